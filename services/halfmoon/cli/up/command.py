"""`halfmoon up`, from options to an orderly end."""

import asyncio
import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from halfmoon.bus.errors import BusError
from halfmoon.bus.nats import NatsBus, NatsSettings
from halfmoon.cli.up.plan import Endpoints, ProcessSpec, UpOptions, plan_processes
from halfmoon.cli.up.screen import StartScreen, curl_to_paste, system_table
from halfmoon.cli.up.servers import ServerMissing
from halfmoon.cli.up.supervisor import Supervisor, SupervisorError
from halfmoon.cli.up.watch import Watch, ready

_POLL_S = 0.1
READY_TIMEOUT_S = 300.0


class UpError(Exception):
    """The system can't come up here; the message says why and what to do."""


def run_up(options: UpOptions, console: Console) -> int:
    """Run the system until it is told to stop. The exit code: 0 after a clean stop, 1 after a failure."""
    try:
        check_port(options.port)
        with lock_data_dir(options.data_dir):
            return asyncio.run(_Up(options, console).run())
    except (UpError, SupervisorError, ServerMissing, BusError) as error:
        console.print(f"halfmoon up: {error}", style="red", markup=False, highlight=False)
        return 1


def check_port(port: int) -> None:
    """Raises `UpError` where the gateway's port is taken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise UpError(
                f"port {port} can't be used ({error.strerror}): stop what listens there, or choose another with "
                f"--port (make up PORT=8001)"
            ) from None


@contextlib.contextmanager
def lock_data_dir(data_dir: Path) -> Iterator[None]:
    """Hold the data directory for this process. Raises `UpError` where it can't be written, or another holds it."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UpError(
            f"data directory {data_dir} can't be used: {error.strerror}; choose one with --data-dir"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UpError(
            f"another `halfmoon up` runs in {data_dir}: stop it, or choose another directory with --data-dir"
        ) from None
    finally:
        os.close(descriptor)


def cluster_secret(data_dir: Path) -> str:
    """The secret that nodes show each other: drawn once per data directory."""
    path = data_dir / "cluster.secret"
    with contextlib.suppress(FileNotFoundError):
        return path.read_text().strip()
    secret = secrets.token_hex(32)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret)
    return secret


class _Up:
    def __init__(self, options: UpOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._supervisor = Supervisor(
            options.data_dir,
            drain_timeout_s=options.drain_timeout_s,
            tell=lambda text: console.print(text, markup=False),
        )

    async def run(self) -> int:
        asked_to_stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, asked_to_stop.set)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(signal.SIGHUP, self._hang_up, asked_to_stop)
        life = asyncio.create_task(self._live())
        stop = asyncio.create_task(asked_to_stop.wait())
        try:
            await asyncio.wait((life, stop), return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                life.result()  # raises what ended it: it doesn't end by itself
            return 0
        finally:
            for task in (life, stop):
                task.cancel()
            await asyncio.gather(life, stop, return_exceptions=True)
            await self._shut_down()

    def _hang_up(self, asked_to_stop: asyncio.Event) -> None:
        """The terminal is gone: what would be written to it now is an error."""
        self._console.quiet = True
        asked_to_stop.set()

    async def _live(self) -> None:
        console, options = self._console, self._options
        console.print(f"halfmoon: data and logs are in {options.data_dir}", markup=False, highlight=False)
        endpoints = await self._supervisor.start_servers()
        specs = plan_processes(
            options, endpoints, secret=cluster_secret(options.data_dir), host=socket.gethostname() or "localhost"
        )
        await self._supervisor.start_services(specs)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._supervisor.watch())
                group.create_task(self._announce(endpoints, specs))
        except* SupervisorError as errors:
            raise errors.exceptions[0] from None
        except* (UpError, BusError) as errors:
            raise errors.exceptions[0] from None

    async def _announce(self, endpoints: Endpoints, specs: list[ProcessSpec]) -> None:
        """Show the start, and say `ready` once a real generation has passed end to end."""
        console, options = self._console, self._options
        bus = await NatsBus.connect(NatsSettings(url=endpoints.nats_url, name="halfmoon-up"))
        watch = Watch(bus)
        try:
            await watch.start()
            await self._until_ready(watch, specs)
        finally:
            await watch.stop()
            await bus.close()
        console.print(system_table(options, endpoints, specs, self._supervisor.children))
        console.print(
            f"traces: halfmoon trace --data-dir {options.data_dir} REQUEST_ID",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        console.print("ready", style="bold green")
        console.print(curl_to_paste(options), markup=False, highlight=False, soft_wrap=True)

    async def _until_ready(self, watch: Watch, specs: list[ProcessSpec]) -> None:
        deadline = asyncio.get_running_loop().time() + READY_TIMEOUT_S
        with StartScreen(self._console, [spec.name for spec in specs]) as screen:
            while True:
                for spec in specs:
                    screen.show(spec.name, watch.progress(spec.name))
                is_ready, waits_for = await ready(self._options.port)
                if is_ready:
                    for spec in specs:
                        screen.show(spec.name, 1.0)
                    return
                if asyncio.get_running_loop().time() > deadline:
                    raise UpError(
                        f"not ready after {READY_TIMEOUT_S:.0f} s: {waits_for}; the logs in "
                        f"{self._options.data_dir / 'logs'} say more"
                    )
                await asyncio.sleep(_POLL_S)

    async def _shut_down(self) -> None:
        if not self._supervisor.children:
            return
        self._console.print("stopping: draining requests, then every process", markup=False)
        killed = await self._supervisor.stop()
        for name in killed:
            self._console.print(f"{name} didn't end in time and was killed", style="yellow", markup=False)
        # Empty unless a pool had to be killed: then its arena is freed with the folder.
        shutil.rmtree(self._options.shm_dir, ignore_errors=True)
        self._console.print("stopped")
