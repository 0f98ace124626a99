"""A registry as a process of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path


class RegistryProcess:
    """`python -m halfmoon.registry`. It can be started again after its end."""

    def __init__(self, folder: Path, name: str, **settings: str) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        self._environ = {each: value for each, value in os.environ.items() if not each.startswith("HALFMOON_")}
        self._environ |= {f"HALFMOON_{each.upper()}": value for each, value in settings.items()}
        self._environ |= {"HALFMOON_WORKER_ID": name, "HALFMOON_DATA_DIR": str(folder / name)}
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "halfmoon.registry"],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        assert self.end(signal.SIGKILL) == -signal.SIGKILL, self.output

    def end(self, number: int) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout=15.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout=5.0)
            raise
