"""Finding out, ahead of need, which of the chunks that would go next are on other nodes too: those go first.

The pool asks a conductor about its next victims, every second while it evicts. So nobody has to be asked at the moment
when a slot is needed. An answer holds until the next one; what another node announces to have let go meanwhile is
surplus no more, nor is anything once a node is lost.
"""

import asyncio
from typing import TypeVar

import structlog

from halfmoon.bus.codec import Decoder
from halfmoon.bus.endpoint import call
from halfmoon.bus.errors import BusError, Undecodable
from halfmoon.bus.protocol import Bus, BusMessage, Subscription
from halfmoon.kv_tier.store import ChunkStore
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkEvent, ChunkEvicted
from halfmoon.schemas.copies import AskSurplus, Surplus
from halfmoon.schemas.ids import ChunkKey, NodeId
from halfmoon.schemas.registry import MemberEvent, MemberLost

M = TypeVar("M")

MAX_ASKED = 512
"""Chunks in one question: what goes in a second, and more."""
_TIMEOUT_S = 1.0


class Trimmer:
    """`run` is its one task, cancelled by its owner; `open` and `close` its subscriptions."""

    def __init__(
        self, store: ChunkStore, bus: Bus, log: structlog.stdlib.BoundLogger, *, node: NodeId, free_share: float
    ) -> None:
        """Asks while fewer than `free_share` of the slots are free."""
        self._store = store
        self._bus = bus
        self._log = log
        self._node = node
        self._min_free = free_share * store.arena.num_slots
        self._events: Decoder[ChunkEvent] = Decoder(ChunkEvent)
        self._members: Decoder[MemberEvent] = Decoder(MemberEvent)
        self._subscriptions: list[Subscription] = []
        self._is_asking = False
        self._doubted: set[ChunkKey] = set()
        """What others have let go while a conductor answers."""
        self._is_lost = False
        """Whether that may be anything."""

    async def open(self) -> None:
        for subject, hear in ((subjects.EVICT_ALL, self._on_evict), (subjects.MEMBER_EVENTS, self._on_member)):
            self._subscriptions.append(await self._bus.subscribe(subject, hear))

    async def close(self) -> None:
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await subscription.unsubscribe()

    async def run(self, every_s: float) -> None:
        """Never returns."""
        while True:
            await asyncio.sleep(every_s)
            await self.look()

    async def look(self) -> None:
        """Ask once, where there is need."""
        evictor, slots = self._store.evictor, self._store.ledger.slots
        if slots.counts().free >= self._min_free:
            evictor.set_surplus(())
            return
        metas = (slots[number].meta for number in evictor.victims(MAX_ASKED))
        keys = tuple(meta.key for meta in metas if meta is not None)
        if not keys:
            return
        self._doubted.clear()
        self._is_lost = False
        self._is_asking = True
        try:
            answer = await call(
                self._bus, subjects.SURPLUS, AskSurplus(node=self._node, keys=keys), Surplus, timeout_s=_TIMEOUT_S
            )
        except BusError as error:
            # No conductor knows: then all chunks are alike.
            self._log.debug("no answer about copies elsewhere", error=str(error))
            evictor.set_surplus(())
            return
        finally:
            self._is_asking = False
        evictor.set_surplus(() if self._is_lost else (key for key in answer.keys if key not in self._doubted))

    async def _on_evict(self, message: BusMessage) -> None:
        is_of_use = self._is_asking or self._store.evictor.num_surplus > 0
        if not is_of_use or message.subject == subjects.evict(self._node):
            return
        event = self._decoded(self._events, message)
        if isinstance(event, ChunkEvicted):
            if self._is_asking:
                self._doubted.update(event.keys)
            self._store.evictor.doubt_surplus(event.keys)
        else:
            self._doubt_all()

    async def _on_member(self, message: BusMessage) -> None:
        event = self._decoded(self._members, message)
        if isinstance(event, MemberLost) and event.node is not None:
            self._doubt_all()

    def _doubt_all(self) -> None:
        self._is_lost = True
        self._store.evictor.set_surplus(())

    def _decoded(self, decoder: Decoder[M], message: BusMessage) -> M | None:
        try:
            return decoder.decode(message.data, message.headers)
        except Undecodable as error:
            self._log.warning("undecodable message", subject=message.subject, error=str(error))
            return None
