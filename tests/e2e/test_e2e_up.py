"""`halfmoon up` as a person uses it: comes up, says so, survives a death, and leaves nothing behind."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from halfmoon.bus.endpoint import call
from halfmoon.bus.errors import BusError
from halfmoon.bus.nats import NatsBus, NatsSettings
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import NodeId
from halfmoon.schemas.pool_stats import PoolStats, Stats
from support.faults import Faults, processes_of
from support.system import System, clean_environ, free_port, up_command
from support.wait import until_blocking

pytestmark = pytest.mark.timeout(300)

MODEL = "SmolLM2-135M-Instruct"
SIM = ("--engine=sim", "--arena-mib=16", "--chunk-tokens=64")
PROCESSES = ("nats", "etcd", "registry", "kv-tier-node-a", "kv-tier-node-b", "conductor", "decode-1", "gateway")


@pytest.fixture
def system(model: Path, tmp_path: Path) -> Iterator[System]:
    system = System.start(tmp_path / "data", model, *SIM)
    yield system
    system.stop()


@pytest.fixture(scope="module")
def lasting(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """For all tests that leave it as well as they found it."""
    system = System.start(tmp_path_factory.mktemp("up"), model, *SIM)
    yield system
    # Nothing is left that a drain would wait for, up to its 30 s.
    until_blocking(lambda: is_idle(system), 15, what="all leases are given back")
    started = time.monotonic()
    assert system.stop() == 0
    assert time.monotonic() - started < 20


def ask(system: System, prompt: str = "One, two,", max_tokens: int = 3) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return httpx.post(f"{system.url}/v1/completions", json=body, timeout=40)


def is_ready(system: System) -> bool:
    try:
        return httpx.get(f"{system.url}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def until_answered(system: System, prompt: str) -> httpx.Response:
    """The first answer that is none of what a system may say while it recovers."""
    answers: list[httpx.Response] = []

    def is_answered() -> bool:
        try:
            answers.append(ask(system, prompt))
        except httpx.TransportError:  # the gateway itself is away
            return False
        assert answers[-1].status_code in (200, 429, 502, 503, 504), answers[-1].text
        return answers[-1].status_code == 200

    until_blocking(is_answered, 60, what="an answer")
    return answers[-1]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def arenas(system: System) -> list[Path]:
    from halfmoon.cli.up.plan import UpOptions

    folder = UpOptions(model=Path(), model_name="", data_dir=system.data_dir).shm_dir
    return [folder, *folder.glob("*")] if folder.exists() else []


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_a_stop_leaves_no_process_and_no_memory(system: System, number: signal.Signals) -> None:
    pids = [system.pid(name) for name in (*PROCESSES, "prefill-1")]
    assert all(is_alive(pid) for pid in pids)
    assert len(arenas(system)) == 3
    assert ask(system).status_code == 200
    assert system.stop(number) == 0
    assert not [pid for pid in pids if is_alive(pid)]
    assert arenas(system) == []
    assert system.text.rstrip().endswith("stopped")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.nightly)])
def test_without_a_reader_it_comes_up_and_stops_all_the_same(
    model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    port = free_port()
    # Whoever runs the tests may ignore a closed terminal, as `nohup` does: here it isn't ignored.
    command = ["env", "--default-signal=HUP", *up_command(tmp_path, model, port, *SIM)]
    process = subprocess.Popen(command, env=clean_environ(), stdout=subprocess.PIPE, text=True, start_new_session=True)
    system = System(process, port, tmp_path)
    try:
        assert subprocess.run(["head", "-n1"], stdin=process.stdout, stdout=subprocess.DEVNULL).returncode == 0
        assert process.stdout is not None
        process.stdout.close()
        until_blocking(lambda: is_ready(system), 200, what="ready")
        pids = processes_of(system).values()
        assert len(pids) == len(PROCESSES) + 1
    finally:
        code = system.stop(number)
    assert code == 0
    assert not [pid for pid in pids if is_alive(pid)]
    assert arenas(system) == []


def test_the_table_and_the_curl_are_true(lasting: System) -> None:
    system = lasting
    until_blocking(lambda: any(line.startswith("curl ") for line in system.output), what="the curl follows `ready`")
    [line] = [line for line in system.output if line.startswith("curl ")]
    done = subprocess.run(["bash", "-c", f"{line.strip()} -s"], capture_output=True, text=True, timeout=40)
    assert '"finish_reason":"length"' in done.stdout
    assert "simulated" in system.text


def test_a_killed_supervisor_leaves_no_process(system: System) -> None:
    pids = [system.pid(name) for name in (*PROCESSES, "prefill-1")]
    system.process.kill()
    system.process.wait(10)
    until_blocking(lambda: not [pid for pid in pids if is_alive(pid)], 40, what="children end with their parent")
    assert arenas(system) == []


def test_a_second_start_in_the_same_folder_is_right_and_warm(model: Path, tmp_path: Path) -> None:
    for _ in range(2):
        system = System.start(tmp_path / "data", model, *SIM)
        first, second = ask(system, "moon " * 70), ask(system, "moon " * 70)
        assert system.stop() == 0
        # What an earlier life held is gone, and known to be gone; what this one holds is used.
        cached = [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)]
        assert cached == [0, 64]
        assert first.json()["choices"] == second.json()["choices"]


def pools(system: System) -> list[PoolStats]:
    """What both pools say of themselves."""

    async def stats() -> list[PoolStats]:
        bus = await NatsBus.connect(NatsSettings(url=system.nats_url, name="test"))
        try:
            return [
                await call(bus, f"{subjects.kv_tier(NodeId(node))}.stats", Stats(), PoolStats, timeout_s=5)
                for node in ("node-a", "node-b")
            ]
        finally:
            await bus.close()

    return asyncio.run(stats())


def is_idle(system: System) -> bool:
    """Nothing is leased or half written. False also where a pool doesn't answer yet."""
    try:
        return all(pool.leased == pool.staged == pool.num_leases == 0 for pool in pools(system))
    except BusError:
        return False


@pytest.mark.parametrize(
    "name", ["prefill-1", "decode-1", "kv-tier-node-a", "conductor", "registry", "gateway", "nats", "etcd"]
)
def test_what_is_killed_comes_back_and_the_next_answer_is_right(lasting: System, name: str) -> None:
    system = lasting
    prompt = "moon " * 100
    before = until_answered(system, prompt)
    os.kill(processes_of(system)[name], signal.SIGKILL)
    until_blocking(lambda: f"{name} (pid" in system.text, 20, what="the death is told")
    after = until_answered(system, prompt)
    assert after.json()["choices"] == before.json()["choices"]
    until_blocking(lambda: is_ready(system), 60, what=f"{name} is back")
    again = until_answered(system, prompt)
    assert again.json()["choices"] == before.json()["choices"]
    until_blocking(lambda: is_idle(system), 15, what="all leases are given back")


def test_what_dies_while_nats_stands_still_comes_back(lasting: System) -> None:
    with Faults(lasting).standing_still("nats"):
        os.kill(processes_of(lasting)["gateway"], signal.SIGKILL)
        until_blocking(
            lambda: any("gateway" in line and "exit code 2" in line for line in lasting.output), 60, what="it refuses"
        )
    assert until_answered(lasting, "After the calm, ").status_code == 200


def test_without_prefill_workers_a_request_is_refused_at_once(lasting: System) -> None:
    until_blocking(lambda: is_ready(lasting), 30)
    # Stopped, not killed: nobody starts it again, and its heartbeats cease.
    with Faults(lasting).standing_still("prefill-1"):
        until_blocking(lambda: not is_ready(lasting), 20)
        answer = ask(lasting, "moon " * 100)
        assert answer.status_code == 503
        assert "prefill" in answer.json()["error"]["message"]
    until_blocking(lambda: is_ready(lasting), 30)
    assert ask(lasting, "moon " * 100).status_code == 200


def test_decode_lost_in_mid_stream_is_an_error_event_and_no_finish(lasting: System) -> None:
    body = {"model": MODEL, "prompt": "One, two,", "max_tokens": 100, "stream": True}
    with httpx.stream("POST", f"{lasting.url}/v1/completions", json=body, timeout=40) as answer:
        events = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))
        first = next(events)
        # Nobody else generates, and it isn't started again: its heartbeats cease.
        with Faults(lasting).standing_still("decode-1"):
            *others, last = events
    error = json.loads(last)["error"]
    assert (error["code"], error["type"]) == ("worker_lost", "server_error")
    assert [json.loads(event)["choices"][0]["finish_reason"] for event in (first, *others)] == [None] * (
        1 + len(others)
    )
    until_blocking(lambda: is_ready(lasting), 30)
    assert ask(lasting).status_code == 200


def test_colocated_workers_answer_and_reuse(model: Path, tmp_path: Path) -> None:
    system = System.start(tmp_path / "data", model, *SIM, "--colocated", "--decode=2")
    try:
        assert not [line for line in system.output if "prefill-1" in line]
        first, second = ask(system, "moon " * 70), ask(system, "moon " * 70)
        assert first.json()["choices"] == second.json()["choices"]
        assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    finally:
        assert system.stop() == 0


def up(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "halfmoon.cli.app", "up", *arguments],
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_port_in_use_is_named(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = up(f"--port={port}", f"--model={model}", f"--data-dir={tmp_path}")
    assert done.returncode == 1
    assert f"port {port} can't be used" in done.stdout.replace("\n", " ")
    assert "--port" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_data_folder_in_use_is_named(lasting: System, model: Path) -> None:
    done = up(f"--port={free_port()}", f"--model={model}", f"--data-dir={lasting.data_dir}", *SIM)
    assert done.returncode == 1
    assert "another `halfmoon up` runs in" in done.stdout


def test_a_model_folder_without_weights_is_named(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "hollow"
    folder.mkdir()
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    done = up(f"--model={folder}", f"--data-dir={tmp_path / 'data'}", f"--port={free_port()}")
    assert done.returncode == 2
    assert "has no model.safetensors" in done.stdout.replace("\n", " ")
    assert up(f"--model={tmp_path / 'nowhere'}", f"--data-dir={tmp_path}").returncode == 2


@pytest.mark.parametrize("service", ["gateway", "conductor", "prefill", "decode", "kv-tier", "registry"])
def test_without_nats_a_service_says_so_and_ends(service: str, model: Path, tmp_path: Path) -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    environ = {
        "HALFMOON_NATS_URL": url,
        "HALFMOON_NATS_CONNECT_TIMEOUT_S": "1",
        "HALFMOON_MODEL": str(model),
        "HALFMOON_DATA_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-m", "halfmoon.cli.app", "run", service],
        env=clean_environ(environ),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert url in done.stderr
    assert "HALFMOON_NATS_URL" in done.stderr
    assert "Traceback" not in done.stderr
