"""A server that a test starts, stops, kills and freezes; what it says is in its folder."""

import os
import signal
import subprocess
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self


class ServerProcess(ABC):
    """One process at a time, which runs within `with`. It keeps its folder over `kill` and a new start."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self._name = name
        self.log_path = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def start(self) -> None:
        """Return once it answers."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

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

    def _launch(self, *command: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def _is_alive(self) -> bool:
        """Fails where it has ended by itself: a test that saw no server must not be told of any other cause."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(
                f"{self._name} ended by itself, with status {self._process.returncode}:\n{self._log()}"
            )
        return True

    def _log(self) -> str:
        return self.log_path.read_text(errors="replace")[-3000:] if self.log_path.is_file() else "(no log)"

    def _signal_and_wait(self, number: int) -> None:
        if self._process is None or not self._is_alive():
            return
        process, self._process = self._process, None
        process.send_signal(signal.SIGCONT)
        process.send_signal(number)
        try:
            process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=5.0)
