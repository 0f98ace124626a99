"""All child processes of `halfmoon up`: started in order, restarted when they die, drained in order.

A process that exits with code 2 at its first start has refused its settings or surroundings: starting it again would
change nothing, so the whole stops and shows what it said. One that dies otherwise is started again, with growing
pauses, a bounded number of times a minute, also where it refuses then: what it needs may be away for a while. The rest
of the system goes on meanwhile, as it would on a cluster.
"""

import asyncio
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from halfmoon.cli.up.plan import STOP_ORDER, Endpoints, ProcessSpec
from halfmoon.cli.up.process import ChildProcess
from halfmoon.cli.up.servers import etcd_command, forget_nats_url, free_ports, nats_command, read_nats_url

REFUSED_EXIT_CODE = 2
MAX_RESTARTS_PER_MINUTE = 5
_SERVER_START_S = 20.0
_POLL_S = 0.02


class SupervisorError(Exception):
    """The system can't be started or kept up; the message says which part failed and what it said."""


class Supervisor:
    """Owns every child. `stop` may be called at any time, also while starting, and leaves none behind."""

    def __init__(self, data_dir: Path, *, drain_timeout_s: float, tell: Callable[[str], None]) -> None:
        self._data_dir = data_dir
        self._drain_timeout_s = drain_timeout_s
        self._tell = tell
        self._servers: dict[str, tuple[list[str], ChildProcess]] = {}
        self._services: dict[str, tuple[ProcessSpec, ChildProcess]] = {}
        self._stopping = False

    @property
    def children(self) -> list[ChildProcess]:
        servers = (child for _, child in self._servers.values())
        return [*servers, *(child for _, child in self._services.values())]

    async def start_servers(self) -> Endpoints:
        """nats-server and etcd, answering. Raises `SupervisorError` with the end of the log of one that doesn't."""
        client_port, peer_port = free_ports(2)
        forget_nats_url(self._data_dir)
        nats = await self._start_server("nats", nats_command(self._data_dir))
        etcd = await self._start_server("etcd", etcd_command(self._data_dir, client_port, peer_port))
        await self._until(nats, lambda: read_nats_url(self._data_dir) is not None)
        await self._until(etcd, lambda: _listens(client_port))
        url = read_nats_url(self._data_dir)
        assert url is not None
        # Should it die, it comes back where its clients look for it.
        port = int(url.rsplit(":", 1)[1])
        self._servers["nats"] = (nats_command(self._data_dir, port), nats)
        return Endpoints(nats_url=url, etcd_url=f"http://127.0.0.1:{client_port}")

    async def start_services(self, specs: Sequence[ProcessSpec]) -> None:
        for spec in specs:
            self._services[spec.name] = (spec, await self._spawn(spec))

    async def watch(self) -> None:
        """Runs until cancelled; restarts what dies. Raises `SupervisorError` where that can't help."""
        try:
            async with asyncio.TaskGroup() as group:
                for name in self._servers:
                    group.create_task(self._keep_up(name, self._restart_server))
                for name in self._services:
                    group.create_task(self._keep_up(name, self._restart_service))
        except* SupervisorError as errors:
            raise errors.exceptions[0] from None

    async def stop(self) -> list[str]:
        """Drain and stop everything, from the outside in. Names of those that had to be killed. Idempotent."""
        self._stopping = True
        killed: list[str] = []
        for service in STOP_ORDER:
            group = [child for spec, child in self._services.values() if spec.service == service]
            clean = await asyncio.gather(*(child.stop(self._drain_timeout_s + 5.0) for child in group))
            killed += [child.name for child, ended in zip(group, clean, strict=True) if not ended]
        for _, server in reversed(self._servers.values()):
            if not await server.stop(10.0):
                killed.append(server.name)
        return killed

    async def _start_server(self, name: str, command: list[str]) -> ChildProcess:
        child = await ChildProcess.start(name, command, environ={}, log_path=self._log(name))
        self._servers[name] = (command, child)
        return child

    async def _spawn(self, spec: ProcessSpec) -> ChildProcess:
        return await ChildProcess.start(spec.name, spec.command, environ=spec.environ, log_path=self._log(spec.name))

    async def _until(self, child: ChildProcess, answers: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _SERVER_START_S
        while not answers():
            if child.exit_code is not None:
                raise SupervisorError(_obituary(child))
            if time.monotonic() > deadline:
                raise SupervisorError(
                    f"{child.name} doesn't answer after {_SERVER_START_S:.0f} s; see {child.log_path}"
                )
            await asyncio.sleep(_POLL_S)

    async def _keep_up(self, name: str, restart: Callable[[str], Awaitable[ChildProcess]]) -> None:
        deaths: deque[float] = deque(maxlen=MAX_RESTARTS_PER_MINUTE)
        child = next(child for child in self.children if child.name == name)
        while True:
            code = await child.wait()
            if self._stopping:
                return
            now = time.monotonic()
            is_refused = code == REFUSED_EXIT_CODE and not deaths
            if is_refused or (len(deaths) == deaths.maxlen and now - deaths[0] < 60.0):
                raise SupervisorError(_obituary(child))
            deaths.append(now)
            self._tell(f"{name} (pid {child.pid}) ended with {_ending(code)}; starting it again")
            recent = sum(1 for death in deaths if now - death < 60.0)
            await asyncio.sleep(min(0.25 * 2 ** (recent - 1), 5.0))
            if self._stopping:
                return
            child = await restart(name)

    async def _restart_service(self, name: str) -> ChildProcess:
        spec, _ = self._services[name]
        child = await self._spawn(spec)
        self._services[name] = (spec, child)
        return child

    async def _restart_server(self, name: str) -> ChildProcess:
        command, _ = self._servers[name]
        return await self._start_server(name, command)

    def _log(self, name: str) -> Path:
        return self._data_dir / "logs" / f"{name}.log"


def _listens(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.2)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _obituary(child: ChildProcess) -> str:
    code = child.exit_code
    ending = "is gone" if code is None else f"ended with {_ending(code)}"
    said = child.tail()
    return f"{child.name} {ending}; its last words (all of them in {child.log_path}):\n{said or '(none)'}"
