"""When the supervisor of `halfmoon up` gives up, and when it tries again."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from halfmoon.cli.up.plan import ProcessSpec
from halfmoon.cli.up.supervisor import Supervisor, SupervisorError


@dataclass(frozen=True)
class Script(ProcessSpec):
    script: str = ""

    @property
    def command(self) -> list[str]:
        return ["sh", "-c", self.script]


def spec(script: str) -> ProcessSpec:
    return Script(name="service-1", service="gateway", node=None, environ={}, script=script)


async def test_a_service_that_refuses_at_its_first_start_ends_the_whole_with_what_it_said(tmp_path: Path) -> None:
    told: list[str] = []
    supervisor = Supervisor(tmp_path, drain_timeout_s=1.0, tell=told.append)
    await supervisor.start_services([spec("echo 'the model is nowhere'; exit 2")])
    with pytest.raises(SupervisorError, match="the model is nowhere"):
        await supervisor.watch()
    assert told == []
    assert await supervisor.stop() == []


async def test_one_that_had_been_up_may_refuse_a_few_times_and_then_ends_the_whole(tmp_path: Path) -> None:
    told: list[str] = []
    supervisor = Supervisor(tmp_path, drain_timeout_s=1.0, tell=told.append)
    was_up = tmp_path / "was_up"
    await supervisor.start_services([spec(f"[ -e {was_up} ] && exit 2; touch {was_up}; kill -9 $$")])
    with pytest.raises(SupervisorError, match="exit code 2"):
        await supervisor.watch()
    assert len(told) == 5
    assert "signal 9" in told[0]
    assert all("exit code 2" in line for line in told[1:])
    assert await supervisor.stop() == []
