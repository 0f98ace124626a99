"""What can happen to the processes of a running `halfmoon up`: killed, or stopped for a while; at random, by a seed."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from support.system import System

MAX_KILLS_A_MINUTE = 4
"""Of one process: `halfmoon up` gives up on one that dies more often."""
SERVERS = ("nats", "etcd")


def processes_of(system: System) -> dict[str, int]:
    """Process id of everything that runs now, by the name that the system's table has for it."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if name := _name_of(entry, str(system.data_dir)):
                    found[name] = int(entry.name)
    return found


def _name_of(process: Path, data_dir: str) -> str | None:
    command = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    for server in SERVERS:
        if Path(command[0]).name.startswith(server) and any(data_dir in argument for argument in command[1:]):
            return server
    environ = environ_of(int(process.name))
    return environ.get("HALFMOON_WORKER_ID") if environ.get("HALFMOON_DATA_DIR") == data_dir else None


def environ_of(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


class Another:
    """One more process of a service that `halfmoon up` starts once, with the settings of the first."""

    def __init__(self, system: System, first: str, name: str) -> None:
        self.name = name
        pid = system.pid(first)
        self._command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
        self._environ = environ_of(pid) | {"HALFMOON_WORKER_ID": name}
        self._log_path = system.data_dir / "logs" / f"{name}.log"
        self.start()

    def start(self) -> None:
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=self._environ, stdout=log, stderr=log)

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def keep_up(self, wait_s: float = 0.0) -> None:
        """Start it again where it has ended, or does so in `wait_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
            self.start()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)


@dataclass(slots=True)
class Faults:
    """Harms one process after the other. The same seed draws the same faults, as far as the same processes live."""

    system: System
    seed: int = 0
    others: list[Another] = field(default_factory=list)
    every_s: float = 2.5
    max_pause_s: float = 10.0
    told: list[str] = field(default_factory=list)
    """What was done, in order."""
    _kills: dict[str, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=MAX_KILLS_A_MINUTE))
    )
    _stopped: set[str] = field(default_factory=set)

    async def run(self, seconds: float) -> None:
        """For so long; at its end all that was stopped runs again."""
        draw, began_s = random.Random(self.seed), time.monotonic()
        async with asyncio.TaskGroup() as pauses:
            while time.monotonic() < began_s + seconds:
                await asyncio.sleep(draw.expovariate(1 / self.every_s))
                for other in self.others:
                    other.keep_up()
                name = draw.choice(sorted(processes_of(self.system)))
                kills, pause_s = draw.random() < 0.5, draw.uniform(0.2, self.max_pause_s)
                if name in self._stopped:
                    continue
                if not kills or name == "nats":
                    self._tell(began_s, f"{name} stands still for {pause_s:.1f} s")
                    pauses.create_task(self._pause(name, pause_s))
                elif self._may_kill(name):
                    self._tell(began_s, f"{name} is killed")
                    self._signal(name, signal.SIGKILL)
        for other in self.others:
            other.keep_up(wait_s=1.0)

    async def _pause(self, name: str, pause_s: float) -> None:
        self._stopped.add(name)
        try:
            with self.standing_still(name):
                await asyncio.sleep(pause_s)
        finally:
            self._stopped.discard(name)

    @contextlib.contextmanager
    def standing_still(self, name: str) -> Iterator[None]:
        self._signal(name, signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(name, signal.SIGCONT)

    def _may_kill(self, name: str) -> bool:
        kills, now_s = self._kills[name], time.monotonic()
        if len(kills) == kills.maxlen and now_s - kills[0] < 65:
            return False
        kills.append(now_s)
        return True

    def _signal(self, name: str, number: int) -> None:
        pid = processes_of(self.system).get(name)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _tell(self, began_s: float, what: str) -> None:
        self.told.append(f"{time.monotonic() - began_s:6.1f} s  {what}")
