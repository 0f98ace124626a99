"""Fixtures that many tests share: real servers in the test's own folder, and buses on them. What needs vLLM is skipped
where there is none."""

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from halfmoon.bus.memory import MemoryBroker, MemoryBus
from halfmoon.bus.nats import NatsBus, NatsSettings
from halfmoon.bus.protocol import Bus
from halfmoon.engine.installed import missing
from support.buses import BusMaker
from support.etcd import EtcdServer
from support.nats import NatsServer

# No test depends on speed: a busy machine is no failure.
settings.register_profile("halfmoon", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("halfmoon")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-vllm", action="store_true", help="fail where no test of the vLLM engine passed")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(VllmTests(config.getoption("--require-vllm")))


_SYSTEMS = ("shm_system", "tcp_system", "any_system")


@cache
def _is_of_systems(file: Path) -> bool:
    return file.parent.name == "e2e" and any(name in file.read_text() for name in _SYSTEMS)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes share the tests (`-n`): a file's tests stay together, and so do all files that name the
    running systems of `tests/e2e`. These begin first, since they take longest."""
    if hasattr(config, "workerinput"):
        for item in items:
            group = "systems" if _is_of_systems(item.path) else item.location[0]
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: (item.path.parent.name != "e2e", not _is_of_systems(item.path)))


_VLLM_WARNINGS = ("DeprecationWarning", "FutureWarning", "UserWarning")
"""What vLLM, and what it imports, says of itself."""


class VllmTests:
    """Skips tests marked `vllm` where it isn't installed, and counts what became of them."""

    def __init__(self, is_required: bool) -> None:
        self._is_required = is_required
        self._passed = 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        reason = missing("vllm")
        for item in items:
            if item.get_closest_marker("vllm"):
                if reason is not None:
                    item.add_marker(pytest.mark.skip(reason=reason))
                for warning in _VLLM_WARNINGS:
                    item.add_marker(pytest.mark.filterwarnings(f"ignore::{warning}"))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed and "vllm" in report.keywords:
            self._passed += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        with warnings.catch_warnings(action="ignore"):
            gc.collect()  # vLLM leaves a ZeroMQ context to the collector, which says so
        if self._is_required and self._passed == 0 and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._is_required:
            terminalreporter.write_line(f"{self._passed} tests of the vLLM engine passed", bold=True)


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A running nats-server with JetStream."""
    with NatsServer(tmp_path / "nats") as server:
        yield server


@pytest.fixture
def etcd_server(tmp_path: Path) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path / "etcd") as server:
        yield server


@pytest.fixture
async def nats_buses(nats_server: NatsServer) -> AsyncIterator[BusMaker]:
    """Makes buses on `nats_server`."""

    async def connect() -> Bus:
        return await NatsBus.connect(NatsSettings(url=nats_server.url))

    async with closing_buses(connect) as make:
        yield make


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.nats)])
async def bus_maker(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[BusMaker]:
    """Makes buses on one broker, in memory and over NATS: the same test for both."""
    if request.param == "memory":
        broker = MemoryBroker()

        async def attach() -> Bus:
            return MemoryBus(broker)

        async with closing_buses(attach) as make:
            yield make
        return
    with NatsServer(tmp_path / "nats") as server:

        async def connect() -> Bus:
            return await NatsBus.connect(NatsSettings(url=server.url))

        async with closing_buses(connect) as make:
            yield make


@asynccontextmanager
async def closing_buses(connect: BusMaker) -> AsyncIterator[BusMaker]:
    """`connect`, whose buses are closed at the end."""
    made: list[Bus] = []

    async def make() -> Bus:
        made.append(await connect())
        return made[-1]

    yield make
    await asyncio.gather(*(bus.close() for bus in made))
