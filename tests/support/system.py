"""The whole system, as a user starts it: `halfmoon up` in a process of its own."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

START_TIMEOUT_S = 200.0
STOP_TIMEOUT_S = 60.0


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def clean_environ(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without its own halfmoon settings, and with few threads."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HALFMOON_")}
    return environ | {"HF_HUB_OFFLINE": "1"} | dict(extra or {})


def up_command(data_dir: Path, model: Path, port: int, *arguments: str) -> list[str]:
    given = (f"--data-dir={data_dir}", f"--model={model}", f"--port={port}", *arguments)
    return [sys.executable, "-m", "halfmoon.cli.app", "up", *given]


@dataclass(slots=True)
class System:
    """A running `halfmoon up`."""

    process: subprocess.Popen[str]
    port: int
    data_dir: Path
    output: list[str] = field(default_factory=list)
    reader: threading.Thread | None = None

    @classmethod
    def start(
        cls,
        data_dir: Path,
        model: Path,
        *arguments: str,
        environ: Mapping[str, str] | None = None,
        timeout_s: float = START_TIMEOUT_S,
    ) -> Self:
        """Start it, and return once it has printed `ready`. Raises AssertionError with its output where it doesn't."""
        port = free_port()
        process = subprocess.Popen(
            up_command(data_dir, model, port, *arguments),
            env=clean_environ(environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        system = cls(process, port, data_dir)
        is_ready = threading.Event()
        system.reader = threading.Thread(target=system._read, args=(is_ready,), daemon=True)
        system.reader.start()
        deadline = time.monotonic() + timeout_s
        while not is_ready.wait(0.1):
            if process.poll() is not None or time.monotonic() > deadline:
                system.stop()
                raise AssertionError(f"no `ready` from halfmoon up:\n{system.text}\n{system.logs()}")
        return system

    def _read(self, is_ready: threading.Event) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.output.append(line)
                if line.strip() == "ready":
                    is_ready.set()

    @property
    def text(self) -> str:
        return "".join(self.output)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def nats_url(self) -> str:
        from halfmoon.cli.up.servers import read_nats_url

        url = read_nats_url(self.data_dir)
        assert url is not None
        return url

    def pid(self, name: str) -> int:
        """Process id of one of its processes, as its table says."""
        for line in self.output:
            cells = [cell.strip() for cell in line.replace("┃", "│").split("│")]
            if len(cells) > 3 and cells[1] == name:
                return int(cells[3])
        raise AssertionError(f"no process {name!r} in:\n{self.text}")

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted((self.data_dir / "logs").glob("*.log"))
        )

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ask it to stop, and return its exit code. Killed, and an AssertionError, where it doesn't in time."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
            raise AssertionError(f"halfmoon up doesn't stop:\n{self.text}") from None
        finally:
            if self.reader is not None and self.process.poll() is not None:
                self.reader.join(10)
