"""Heartbeats in, member events out: the shell around the member table."""

import asyncio
from collections.abc import Callable

import structlog

from halfmoon.bus.endpoint import Endpoint, Envelope, announce, serve
from halfmoon.bus.errors import BusError
from halfmoon.bus.protocol import Bus
from halfmoon.registry.members import MemberTable
from halfmoon.registry.state import MemberPhase
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import WorkerId
from halfmoon.schemas.members import Heartbeat
from halfmoon.schemas.registry import MemberEvent, MemberLost
from halfmoon.tracing.metrics import Metrics

TICK_S = 0.25


class Membership:
    """Who is there. Every registry keeps it; the one for which `leads()` is true announces changes."""

    def __init__(
        self, bus: Bus, *, leads: Callable[[], bool], metrics: Metrics, log: structlog.stdlib.BoundLogger
    ) -> None:
        self.table = MemberTable()
        self._bus = bus
        self._leads = leads
        self._log = log
        self._endpoint: Endpoint | None = None
        self._gone: set[WorkerId] = set()
        self._members = metrics.gauge("registry_members", "Members by phase, as this registry sees them.", ["phase"])

    async def start(self) -> None:
        async def hear(heartbeat: Heartbeat, _: Envelope) -> None:
            await self._tell(self.table.hear(heartbeat, asyncio.get_running_loop().time()))

        self._endpoint = await serve(self._bus, subjects.HEARTBEAT_ALL, Heartbeat, hear)

    async def stop(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.unsubscribe()

    async def watch(self) -> None:
        """Judge who is late, for as long as it isn't cancelled."""
        while True:
            await self._tell(self.table.judge())
            for phase, count in self.table.count().items():
                if phase is not MemberPhase.UNKNOWN:
                    self._members.labels(phase.value).set(count)
            await asyncio.sleep(TICK_S)

    async def announce_all(self) -> None:
        """Say all that is known: what a new leader does, since the last one may have died before it could."""
        await self._tell(self.table.announce_all())

    def take_gone(self) -> frozenset[WorkerId]:
        """Members that were lost or left since the last call."""
        gone, self._gone = frozenset(self._gone), set()
        return gone

    async def _tell(self, events: tuple[MemberEvent, ...]) -> None:
        for event in events:
            if not self._leads():
                continue
            lost = isinstance(event, MemberLost)
            (self._gone.add if lost else self._gone.discard)(event.worker)
            reason = {"reason": event.reason} if isinstance(event, MemberLost) else {}
            self._log.info("member lost" if lost else "member joined", worker=event.worker, node=event.node, **reason)
            try:
                await announce(self._bus, subjects.member(event.worker), event)
            except BusError as error:
                self._log.warning("a member event could not be announced", worker=event.worker, error=str(error))
