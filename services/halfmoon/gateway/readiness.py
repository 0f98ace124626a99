"""Ready means that a real generation has passed end to end, not that ports are open."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing

import msgspec
import structlog

from halfmoon.bus.protocol import Bus
from halfmoon.client import GenerateClient
from halfmoon.gateway.cluster import Cluster, Serving
from halfmoon.gateway.config import GatewayConfig
from halfmoon.gateway.metrics import GatewayMetrics
from halfmoon.schemas.ids import ModelName, TenantId, WorkerId
from halfmoon.schemas.members import HEARTBEAT_INTERVAL_S
from halfmoon.schemas.requests import Failed, Finished, RequestSubmitted, Sampling

PROBE_TENANT = TenantId("halfmoon-probe")
"""Its own, so that no one's cache statistics or contents are touched."""

_NEVER = "no generation has been tried yet"


class ReadyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/ready`."""

    ready: bool
    model: str
    missing: list[str]
    detail: str


class Verdict:
    """What has been proven, by whom. Pure."""

    def __init__(self) -> None:
        self._proven_by: frozenset[tuple[WorkerId, int]] | None = None
        self._serving: Serving | None = None
        self.detail = _NEVER

    @property
    def missing(self) -> tuple[str, ...]:
        return self._serving.missing if self._serving is not None else ("heartbeats",)

    @property
    def ready(self) -> bool:
        return not self.missing and self._proven_by is not None

    def see(self, serving: Serving) -> bool:
        """Take in who is there; whether a generation should now be tried.

        Where a kind of member was missing, nothing is proven any more. Where one was replaced while others of its kind
        went on, service goes on too, and is tried again.
        """
        self._serving = serving
        if serving.missing:
            self._proven_by = None
            self.detail = _NEVER
            return False
        if self._proven_by is None:
            return True
        lost, new = self._proven_by - serving.members, serving.members - self._proven_by
        return bool(lost and new)

    def passed(self, members: frozenset[tuple[WorkerId, int]], seconds: float) -> None:
        """A generation passed while these were there."""
        if not self.missing:
            self._proven_by = members
            self.detail = f"a generation passed end to end in {seconds:.2f} s"

    def failed(self, why: str) -> None:
        self._proven_by = None
        self.detail = f"the last generation tried has failed: {why}"


class Readiness:
    """Tries a generation of one token whenever the verdict asks for it."""

    def __init__(
        self,
        *,
        config: GatewayConfig,
        model: ModelName,
        bus: Bus,
        client: GenerateClient,
        cluster: Cluster,
        prompt: Sequence[int],
        metrics: GatewayMetrics,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._config = config
        self._model = model
        self._bus = bus
        self._client = client
        self._cluster = cluster
        self._prompt = tuple(prompt)
        self._metrics = metrics
        self._log = log
        self._verdict = Verdict()

    def report(self) -> ReadyReport:
        verdict = self._verdict
        verdict.see(self._cluster.serving(self._model))
        missing = list(verdict.missing) if self._bus.is_connected else ["message broker", *verdict.missing]
        return ReadyReport(
            ready=verdict.ready and not missing, model=self._model, missing=missing, detail=verdict.detail
        )

    async def run(self) -> None:
        """Watch and try, until cancelled."""
        was_ready = False
        while True:
            serving = self._cluster.serving(self._model)
            pause_s = HEARTBEAT_INTERVAL_S
            if self._verdict.see(serving) and not await self._try(serving):
                pause_s = self._config.probe_interval_s
            if self._verdict.ready is not was_ready:
                was_ready = self._verdict.ready
                self._log.info("ready" if was_ready else "not ready", detail=self._verdict.detail)
            self._metrics.ready.set(was_ready)
            await asyncio.sleep(pause_s)

    async def _try(self, serving: Serving) -> bool:
        began = time.monotonic()
        deadline_ns = time.time_ns() + int(self._config.probe_timeout_s * 1e9)
        request = RequestSubmitted(
            model=self._model,
            tokens=self._prompt,
            sampling=Sampling(max_tokens=1, temperature=0.0),
            tenant=PROBE_TENANT,
        )
        async with aclosing(self._client.submit(request, deadline_ns=deadline_ns)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    self._verdict.passed(serving.members, time.monotonic() - began)
                    return True
                if isinstance(event, Failed):
                    self._verdict.failed(f"{event.error.code}: {event.error.message}")
                    self._log.warning("a readiness probe failed", code=event.error.code, why=event.error.message)
        return False
