"""`halfmoon up` as a person uses it: comes up, says so, survives a death, and leaves nothing behind."""

import asyncio
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
from halfmoon.schemas.kv_tier import PoolStats, Stats
from support.system import System, clean_environ, free_port
from support.wait import until_blocking

pytestmark = pytest.mark.timeout(150)

MODEL = "SmolLM2-135M-Instruct"
SIM = ("--engine=sim", "--arena-mib=16", "--chunk-tokens=64")
PROCESSES = ("nats", "etcd", "registry", "kv-tier-node-a", "kv-tier-node-b", "conductor", "decode-1", "gateway")


@pytest.fixture
def system(model: Path, tmp_path: Path) -> Iterator[System]:
    system = System.start(tmp_path / "data", model, *SIM)
    yield system
    system.stop()


def ask(system: System, prompt: str = "One, two,", max_tokens: int = 3) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return httpx.post(f"{system.url}/v1/completions", json=body, timeout=40)


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_leaves_no_process_and_no_memory(system: System, number: signal.Signals) -> None:
    pids = [system.pid(name) for name in (*PROCESSES, "prefill-1")]
    assert all(is_alive(pid) for pid in pids)
    assert len(arenas(system)) == 3
    assert ask(system).status_code == 200
    assert system.stop(number) == 0
    assert not [pid for pid in pids if is_alive(pid)]
    assert arenas(system) == []
    assert system.text.rstrip().endswith("stopped")


def test_the_table_and_the_curl_are_true(system: System) -> None:
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
def test_what_is_killed_comes_back_and_the_next_answer_is_right(system: System, name: str) -> None:
    prompt = "moon " * 100
    before = ask(system, prompt)
    os.kill(system.pid(name), signal.SIGKILL)
    until_blocking(lambda: f"{name} (pid" in system.text, 10, what="the death is told")

    def answers() -> bool:
        try:
            return ask(system, prompt).status_code == 200
        except httpx.TransportError:
            return False

    until_blocking(answers, 60, what=f"answers after the death of {name}")
    after = ask(system, prompt)
    assert after.status_code == 200, after.text
    assert after.json()["choices"] == before.json()["choices"]
    until_blocking(lambda: is_idle(system), 15, what="all leases are given back")
    # Nothing is left that a drain would wait for, up to its 30 s.
    started = time.monotonic()
    assert system.stop() == 0
    assert time.monotonic() - started < 20


def test_without_prefill_workers_a_request_is_refused_at_once(model: Path, tmp_path: Path) -> None:
    system = System.start(tmp_path / "data", model, *SIM)
    try:
        # Stopped, not killed: nobody starts it again, and its heartbeats cease.
        pid = system.pid("prefill-1")
        os.kill(pid, signal.SIGSTOP)
        until_blocking(lambda: httpx.get(f"{system.url}/ready", timeout=5).status_code == 503, 20)
        answer = ask(system, "moon " * 100)
        assert answer.status_code == 503
        assert "prefill" in answer.json()["error"]["message"]
        os.kill(pid, signal.SIGCONT)
        until_blocking(lambda: httpx.get(f"{system.url}/ready", timeout=5).status_code == 200, 30)
        assert ask(system, "moon " * 100).status_code == 200
    finally:
        system.stop()


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


def test_a_data_folder_in_use_is_named(system: System, model: Path) -> None:
    done = up(f"--port={free_port()}", f"--model={model}", f"--data-dir={system.data_dir}", *SIM)
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
