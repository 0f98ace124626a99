"""What the transports are measured against: the machine's memcpy, iperf3, and Mooncake's transfer engine over tcp."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from benchmarks.transport_peer import process_cpu_s

MOONCAKE = "mooncake-transfer-engine-non-cuda"
_SCRIPT = Path(__file__).parent / "transport_mooncake.py"
_IMPORT = ("-c", "import mooncake.engine")
_INSTALL_S = 120
_IPERF_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Sample:
    """One pass."""

    num_bytes: int
    wall_s: float
    cpu_s: float
    """Of all processes that took part."""


class Skipped(Exception):
    """This rival can't be had here; the message says why."""


def memcpy(destinations: list[memoryview], sources: list[memoryview], threads: ThreadPoolExecutor | None) -> Sample:
    """Copy each, in this thread or shared out to `threads`: what any transport over shared memory could do at best."""
    pairs = [
        (np.frombuffer(to, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
        for to, source in zip(destinations, sources, strict=True)
    ]
    cpu, started = time.process_time(), time.perf_counter()
    if threads is None:
        for to, source in pairs:
            np.copyto(to, source)
    else:
        list(threads.map(lambda pair: np.copyto(*pair), pairs))
    wall_s = time.perf_counter() - started
    return Sample(sum(len(to) for to in destinations), wall_s, time.process_time() - cpu)


@contextlib.contextmanager
def iperf3_server() -> Iterator[int]:
    """Its port. Raises `Skipped`."""
    if shutil.which("iperf3") is None:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise Skipped("iperf3 isn't installed")
        installed = subprocess.run(["apt-get", "install", "-y", "-q", "iperf3"], capture_output=True, check=False)
        if installed.returncode != 0:
            raise Skipped("iperf3 isn't installed, and apt-get can't install it")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen(
        ["iperf3", "-s", "-p", str(port), "--forceflush"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as server:
        assert server.stdout is not None
        while b"listening" not in (line := server.stdout.readline()):
            if not line:
                raise Skipped("iperf3 doesn't start")
        # It says something about every test; what nobody reads would block it in the end.
        with ThreadPoolExecutor(1) as reader:
            reader.submit(server.stdout.read)
            yield port
            server.terminate()


def iperf3(port: int, num_streams: int) -> Sample:
    """1 GiB over loopback, as the receiver counts it, in writes of 1 MiB (its default of 128 KiB is slower)."""
    command = ["iperf3", "-c", "127.0.0.1", "-p", str(port), "-J", "-l", "1M", "-P", str(num_streams)]
    done = subprocess.run([*command, "-n", str(_IPERF_BYTES // num_streams)], capture_output=True, check=True)
    end = json.loads(done.stdout)["end"]
    received, used = end["sum_received"], end["cpu_utilization_percent"]
    cpu_s = (used["host_total"] + used["remote_total"]) / 100 * received["seconds"]
    return Sample(received["bytes"], received["seconds"], cpu_s)


@dataclass(slots=True)
class Mooncake:
    """A reader and a target, each a process, over the engine's own tcp."""

    reader: "subprocess.Popen[str]"
    target_pid: int
    num_bytes: int

    def read(self) -> Sample:
        """One batch, `batch_transfer_sync_read`."""
        assert self.reader.stdin is not None
        assert self.reader.stdout is not None
        cpu_s = process_cpu_s(self.target_pid)
        self.reader.stdin.write("\n")
        self.reader.stdin.flush()
        wall_s, own_cpu_s = _line(self.reader.stdout, "ROUND")
        return Sample(self.num_bytes, wall_s, own_cpu_s + process_cpu_s(self.target_pid) - cpu_s)


@contextlib.contextmanager
def mooncake(cache: Path, slice_bytes: int, num_slices: int) -> Iterator[Mooncake]:
    """Installed into an environment of its own under `cache`, once. Raises `Skipped`."""
    python = _mooncake_python(cache)
    with _started([python, _SCRIPT, "serve", slice_bytes * num_slices]) as target:
        assert target.stdout is not None
        port, address = _line(target.stdout, "PORT")
        numbers = [int(port), int(address), slice_bytes, num_slices, 1]
        with _started([python, _SCRIPT, "read", *numbers]) as reader:
            assert reader.stdout is not None
            _line(reader.stdout, "READY")
            yield Mooncake(reader, target.pid, slice_bytes * num_slices)


def _mooncake_python(cache: Path) -> Path:
    folder = cache / "mooncake"
    python = folder / "bin" / "python"
    if python.exists() and subprocess.run([python, *_IMPORT], capture_output=True, check=False).returncode == 0:
        return python
    try:
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run(
            [python, "-m", "pip", "install", "-q", MOONCAKE], capture_output=True, check=True, timeout=_INSTALL_S
        )
        subprocess.run([python, *_IMPORT], capture_output=True, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise Skipped(f"{MOONCAKE} can't be installed or started: {type(error).__name__}") from None
    return python


@contextlib.contextmanager
def _started(command: list[object]) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.terminate()


def _line(output: IO[str], word: str) -> list[float]:
    """The numbers behind this word, on a line that begins with it; what else is printed is skipped."""
    for line in output:
        if line.startswith(word):
            return [float(text) for text in line.split()[1:]]
    raise Skipped(f"{MOONCAKE} ended without saying {word}")
