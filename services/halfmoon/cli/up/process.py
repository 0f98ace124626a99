"""One child process: started on a leash, its output in a log file, stopped with SIGTERM and, late, SIGKILL."""

import asyncio
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from halfmoon.cli.leash import PARENT
from halfmoon.cli.up.servers import leashed

_TAIL_LINES = 12


@dataclass(slots=True)
class ChildProcess:
    """A running child. Its whole output goes to `log_path`."""

    name: str
    process: asyncio.subprocess.Process
    log_path: Path

    @classmethod
    async def start(cls, name: str, command: list[str], *, environ: Mapping[str, str], log_path: Path) -> Self:
        """Start `command` with `environ` added to this process's own. The log of the life before is kept as `.1`."""
        log_path.parent.mkdir(parents=True, exist_ok=True)
        if log_path.exists():
            log_path.replace(log_path.with_suffix(".log.1"))
        descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            process = await asyncio.create_subprocess_exec(
                *leashed(command),
                env={**os.environ, **environ, PARENT: str(os.getpid())},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
            )
        finally:
            os.close(descriptor)
        return cls(name, process, log_path)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for the signal that ended it."""
        return self.process.returncode

    async def wait(self) -> int:
        return await self.process.wait()

    async def stop(self, timeout_s: float) -> bool:
        """SIGTERM; after `timeout_s`, SIGKILL. True where the child ended by itself. Idempotent."""
        if self.exit_code is not None:
            return True
        try:
            self.process.terminate()
            await asyncio.wait_for(self.process.wait(), timeout_s)
        except ProcessLookupError:
            return True
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
            return False
        return True

    def tail(self) -> str:
        """The last lines that it wrote, for an error message."""
        try:
            with self.log_path.open(errors="replace") as lines:
                return "".join(deque(lines, _TAIL_LINES)).rstrip()
        except OSError:
            return ""
