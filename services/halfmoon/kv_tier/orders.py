"""Carries out the registry's standing orders at one node: pins and flushes.

at start    ask the registry for all of them ──→ only then may what survived on the SSD be found
later       the registry tells (`flush`, `pin`, `unpin`), in the order of their numbers
after a gap, or when told `catch_up`: ask again for what has been missed
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator

import structlog

from halfmoon.bus.endpoint import Envelope, call
from halfmoon.bus.errors import BusError
from halfmoon.bus.protocol import Bus
from halfmoon.kv_tier.flushes import flushed_by
from halfmoon.kv_tier.slots import Slot
from halfmoon.kv_tier.store import ChunkStore
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkMeta, EvictReason, Tier
from halfmoon.schemas.ids import ChunkKey
from halfmoon.schemas.kv_tier import (
    CatchUp,
    ChunksFlushed,
    Done,
    FlushChunks,
    PinChunks,
    PinsHeld,
    TierFlush,
    UnpinChunks,
)
from halfmoon.schemas.orders import FlushOrder
from halfmoon.schemas.registry import Orders, StandingOrders

_ASK_TIMEOUT_S = 5.0
_FIRST_RETRY_S = 0.25
_MAX_RETRY_S = 2.0


class OrderKeeper:
    """`run` is one task's whole work; its owner cancels it. The handlers answer the registry."""

    def __init__(self, store: ChunkStore, bus: Bus, log: structlog.stdlib.BoundLogger) -> None:
        self._store = store
        self._bus = bus
        self._log = log
        self.seq = 0
        """All orders up to this number are carried out here."""
        self.known = asyncio.Event()
        """Set once the registry has told what it keeps: from then on, what survived on disk may be announced."""
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Catch up at the start, and whenever something was missed."""
        retry_s = _FIRST_RETRY_S
        self._wake.set()
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._catch_up()
                retry_s = _FIRST_RETRY_S
            except BusError as error:
                if retry_s == _FIRST_RETRY_S:
                    self._log.warning("standing orders not known yet: pins wait", error=str(error))
                self._wake.set()
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _MAX_RETRY_S)

    async def flush(self, request: FlushChunks, envelope: Envelope) -> ChunksFlushed:
        flushed = self._flush(request.order, is_late=False)
        self._reached(request.order.seq)
        return flushed

    async def pin(self, request: PinChunks, envelope: Envelope) -> PinsHeld:
        held = self._store.pins.add(request.keys)
        self._reached(request.seq)
        return held

    async def unpin(self, request: UnpinChunks, envelope: Envelope) -> PinsHeld:
        self._store.pins.remove(request.keys)
        self._reached(request.seq)
        return PinsHeld(num_pinned=0, num_absent=0, max_slots=self._store.pins.max_slots)

    async def catch_up(self, request: CatchUp, envelope: Envelope) -> Done:
        self._wake.set()
        return Done()

    async def _catch_up(self) -> None:
        told = await call(
            self._bus, subjects.registry("orders"), Orders(after=self.seq), StandingOrders, timeout_s=_ASK_TIMEOUT_S
        )
        for order in told.flushes:
            if order.seq > self.seq:
                flushed = self._flush(order, is_late=True)
                num_chunks = sum(each.num_chunks for each in flushed.tiers)
                self._log.info("a flush was missed, and is made up for", seq=order.seq, num_chunks=num_chunks)
        if told.seq >= self.seq:
            self._store.pins.replace([pin.key for pin in told.pins])
            self.seq = told.seq
        self.known.set()

    def _reached(self, seq: int) -> None:
        """This order is carried out. Where one before it wasn't, it is asked for."""
        if seq == self.seq + 1:
            self.seq = seq
        elif seq > self.seq:
            self._wake.set()

    def _flush(self, order: FlushOrder, *, is_late: bool) -> ChunksFlushed:
        store = self._store
        store.expire()
        slots = list(store.ledger.slots.readable())
        gone = flushed_by(order, [slot.meta for slot in slots if slot.meta is not None], is_late=is_late)
        store.flushes.carried_out(order, store.ledger.leases.request_ids())
        return self._withdraw([slot for slot in slots if slot.key in gone], gone)

    def _withdraw(self, slots: list[Slot], keys: Iterable[ChunkKey]) -> ChunksFlushed:
        # Copies that aren't registered first, so that none of them takes the place of the one that is.
        slots.sort(key=lambda slot: slot.registered)
        num_bytes = sum(slot.num_bytes for slot in slots)
        num_leased = sum(slot.num_leases > 0 for slot in slots)
        self._store.withdraw(slots, EvictReason.FLUSH)
        dram = TierFlush(tier=Tier.DRAM, num_chunks=len(slots), num_bytes=num_bytes)
        return ChunksFlushed(tiers=(dram,) if slots else (), num_leased=num_leased)
