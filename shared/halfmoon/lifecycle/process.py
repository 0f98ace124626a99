"""A service's process, from settings to the last heartbeat.

1. Settings are read, logs and traces set up, the bus connected: what fails here prints one line and exits with 2.
2. Heartbeats begin; the service starts.
3. SIGTERM, SIGINT or the service's own failure ends the wait.
4. The service drains (bounded; a second signal cuts it short), then stops; the last heartbeat is `Goodbye`.
5. Bus, traces and metrics are closed. The exit code is 0, or 1 where the service failed.
"""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec
import structlog
import uvloop

from halfmoon.bus.errors import BusError, BusUnavailable
from halfmoon.bus.nats import NatsBus, NatsSettings
from halfmoon.bus.protocol import Bus
from halfmoon.config import CommonConfig, ConfigError, load_config
from halfmoon.lifecycle.runtime import Runtime, Service, StartupError
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import WorkerId
from halfmoon.schemas.members import HEARTBEAT_INTERVAL_S, Goodbye, Heartbeat
from halfmoon.tasks import ended
from halfmoon.tracing import TelemetryConfig, setup
from halfmoon.tracing.logs import configure_logs
from halfmoon.tracing.metrics import Metrics, serve_metrics

C = TypeVar("C", bound=CommonConfig)

EXIT_OK, EXIT_FAILED, EXIT_REFUSED = 0, 1, 2


def run(
    service: str,
    config_class: type[C],
    build: Callable[[Runtime[C]], Service],
    *,
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Run one service until it is told to stop, and return the process's exit code."""
    try:
        config = load_config(config_class, service, environ)
        configure_logs(service, level=config.log_level, log_format=config.log_format)
        code: int = uvloop.run(_Process(service, config, build).live())
        return code
    except (ConfigError, StartupError, BusUnavailable) as error:
        print(f"halfmoon {service}: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except BusError as error:
        print(f"halfmoon {service}: NATS went away during the start: {error}; start it again", file=sys.stderr)
        return EXIT_FAILED
    except ValueError as error:
        print(f"halfmoon {service}: {error}", file=sys.stderr)
        return EXIT_REFUSED


class _Process:
    def __init__(self, service: str, config: C, build: Callable[[Runtime[C]], Service]) -> None:
        self._service = service
        self._config = config
        self._build = build
        self._log = structlog.stdlib.get_logger(f"halfmoon.{service}")
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._failure: str | None = None

    async def live(self) -> int:
        self._hear_signals()
        config = self._config
        worker_id = WorkerId(config.worker_id or f"{self._service}-{socket.gethostname()}-{os.getpid()}")
        telemetry = setup(
            self._service,
            TelemetryConfig(
                otlp_endpoint=config.otlp_endpoint,
                sample_ratio=config.trace_sample_ratio,
                store_path=config.data_dir / "traces.db",
                worker=worker_id,
            ),
        )
        metrics = Metrics()
        metrics.observe_telemetry(telemetry)
        try:
            server = serve_metrics(metrics.registry, config.metrics_host, config.metrics_port)
        except OSError as error:
            raise StartupError(error.strerror) from None
        try:
            bus = await NatsBus.connect(
                NatsSettings(
                    url=config.nats_url,
                    name=worker_id,
                    user=config.nats_user,
                    password=config.nats_password,
                    credentials=config.nats_credentials,
                    connect_timeout_s=config.nats_connect_timeout_s,
                )
            )
            runtime = Runtime(
                service=self._service,
                worker_id=worker_id,
                config=config,
                bus=bus,
                telemetry=telemetry,
                metrics=metrics,
                log=self._log,
                started_ns=time.time_ns(),
                fail=self._fail,
            )
            try:
                await self._serve(runtime, self._build(runtime))
            finally:
                await bus.close()
        finally:
            if server is not None:
                server.close()
            await telemetry.aclose()
        return EXIT_FAILED if self._failure is not None else EXIT_OK

    async def _serve(self, runtime: "Runtime[C]", service: Service) -> None:
        heart = asyncio.create_task(_beat(runtime.bus, runtime.worker_id, service.heartbeat, self._log))
        try:
            if await self._start(service):
                # At once: others are served by now, and send nothing to who still says `loading`.
                await _beat_once(runtime.bus, runtime.worker_id, service.heartbeat, self._log)
                self._log.info("started", worker=runtime.worker_id)
                await self._stop.wait()
                await self._drain(service)
        finally:
            await service.stop()
            await ended(heart)
            await _say_goodbye(runtime.bus, runtime.worker_id)
            self._log.info("stopped", worker=runtime.worker_id)

    async def _start(self, service: Service) -> bool:
        """Start the service. False where it was told to stop meanwhile."""
        starting = asyncio.create_task(service.start())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                return True
            return False
        finally:
            await ended(starting, stopping)

    async def _drain(self, service: Service) -> None:
        draining = asyncio.create_task(service.drain())
        hurry = asyncio.create_task(self._hurry.wait())
        try:
            done, _ = await asyncio.wait(
                (draining, hurry), timeout=self._config.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if draining in done:
                draining.result()
            else:
                self._log.warning(
                    "drain cut short: what still ran is cut off", drain_timeout_s=self._config.drain_timeout_s
                )
        finally:
            await ended(draining, hurry)

    def _fail(self, why: str) -> None:
        if self._failure is None:
            self._failure = why
            self._log.error("failed", why=why)
        self._stop.set()

    def _hear_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self._hurry if self._stop.is_set() else self._stop).set()


async def _beat(
    bus: Bus, worker_id: WorkerId, heartbeat: Callable[[], Heartbeat], log: structlog.stdlib.BoundLogger
) -> None:
    """Publish heartbeats at fixed times, whatever the broker's state: those that can't be sent are skipped."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        await _beat_once(bus, worker_id, heartbeat, log)
        due = max(due + HEARTBEAT_INTERVAL_S, loop.time())
        await asyncio.sleep(due - loop.time())


async def _beat_once(
    bus: Bus, worker_id: WorkerId, heartbeat: Callable[[], Heartbeat], log: structlog.stdlib.BoundLogger
) -> None:
    try:
        await bus.publish(subjects.heartbeat(worker_id), msgspec.msgpack.encode(heartbeat()))
    except BusError as error:
        log.debug("heartbeat not sent", error=str(error))


async def _say_goodbye(bus: Bus, worker_id: WorkerId) -> None:
    try:
        await bus.publish(subjects.heartbeat(worker_id), msgspec.msgpack.encode(Goodbye(worker=worker_id)))
        await bus.flush(timeout_s=1.0)
    except BusError:
        return  # it will be missed instead
