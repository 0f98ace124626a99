"""What a service is given, and what it must provide."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import structlog

from halfmoon.bus.protocol import Bus
from halfmoon.config import CommonConfig
from halfmoon.schemas.ids import WorkerId
from halfmoon.schemas.members import Heartbeat
from halfmoon.tracing import Telemetry
from halfmoon.tracing.metrics import Metrics

C = TypeVar("C", bound=CommonConfig)


class StartupError(Exception):
    """A service can't start, for a reason that its operator can mend. The message says which, and how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime(Generic[C]):
    """The parts that every service works with. The process owns them; the service doesn't close them."""

    service: str
    worker_id: WorkerId
    config: C
    bus: Bus
    telemetry: Telemetry
    metrics: Metrics
    log: structlog.stdlib.BoundLogger
    started_ns: int
    """Unix time at which this life of the process began."""
    fail: Callable[[str], None]
    """Ends the process, with an orderly stop and exit code 1, where the service can't go on. The text says why."""


class Service(Protocol):
    """A service's life, in order; each step is called once, by one task.

    1. `start()` returns when the service takes work. Raises `StartupError`. A stop during the start cancels it.
    2. `heartbeat()` is called every 250 ms, from before `start` until after `drain`. It must not block.
    3. `drain()` stops taking work and waits for what runs. It may be cut off after `drain_timeout_s`.
    4. `stop()` lets go of everything, also after a `start` that failed half-way. Idempotent.
    """

    async def start(self) -> None: ...

    async def drain(self) -> None: ...

    async def stop(self) -> None: ...

    def heartbeat(self) -> Heartbeat: ...
