"""Carries out the registry's standing orders at one node: pins and flushes.

at start    ask the registry for all of them ──→ only then may what survived on the SSD be found
later       the registry tells (`flush`, `pin`, `unpin`), in the order of their numbers
after a gap, or when told `catch_up`: ask again for what has been missed
"""

import asyncio
from pathlib import Path

import structlog

from halfmoon.bus.endpoint import Envelope, call
from halfmoon.bus.errors import BusError
from halfmoon.bus.protocol import Bus
from halfmoon.kv_tier.flushes import flushed_by
from halfmoon.kv_tier.lower_tier import LowerTier
from halfmoon.kv_tier.store import ChunkStore
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import EvictReason, Tier
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

    def __init__(
        self, store: ChunkStore, bus: Bus, log: structlog.stdlib.BoundLogger, lower: LowerTier | None = None
    ) -> None:
        """`lower`: an SSD with what an earlier life left on it, not attached to the store yet."""
        self._store = store
        self._bus = bus
        self._log = log
        self._lower = lower
        self.seq = 0
        """All orders up to this number are carried out here."""
        self.caught_up = asyncio.Event()
        """Set once the registry has told for the first time what stands."""
        self._wake = asyncio.Event()
        self._has_looked = lower is None
        """Whether what was on the SSD at the start has been looked through."""

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
                    waits = "pins wait" if self._has_looked else "pins and the SSD's content wait"
                    self._log.warning(f"standing orders not known yet: {waits}", error=str(error))
                self._wake.set()
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _MAX_RETRY_S)

    async def flush(self, request: FlushChunks, envelope: Envelope) -> ChunksFlushed:
        self._store.pins.remove(request.unpin)
        flushed = self._flush(request.order, is_late=False)
        if self._lower is not None:
            await self._lower.ssd.settled()
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
        """An SSD's content is from before this life: it's looked through by all flushes that stand."""
        is_first = not self._has_looked
        after = 0 if is_first else self.seq
        told = await call(
            self._bus, subjects.registry("orders"), Orders(after=after), StandingOrders, timeout_s=_ASK_TIMEOUT_S
        )
        if told.seq < self.seq:
            self._wake.set()
            await asyncio.sleep(_FIRST_RETRY_S)
            return
        known_seq = await asyncio.to_thread(_read_seq, self._note) if is_first else 0
        for order in told.flushes:
            if not (order.is_merged and order.seq <= known_seq) and (is_first or order.seq > self.seq):
                flushed = self._flush(order, is_late=True)
                if num_chunks := sum(each.num_chunks for each in flushed.tiers):
                    self._log.info("made up for a missed flush", seq=order.seq, num_chunks=num_chunks)
        self._store.pins.replace([pin.key for pin in told.pins])
        self.seq = told.seq
        if not self._has_looked and self._lower is not None:
            self._has_looked = True
            self._store.attach(self._lower)
        self.caught_up.set()
        await self._note_seq()

    def _reached(self, seq: int) -> None:
        """This order is carried out. Where one before it wasn't, it is asked for."""
        if seq == self.seq + 1:
            self.seq = seq
        elif seq > self.seq:
            self._wake.set()

    def _flush(self, order: FlushOrder, *, is_late: bool) -> ChunksFlushed:
        store, ssd = self._store, None if self._lower is None else self._lower.ssd
        store.expire()
        slots = list(store.ledger.slots.readable())
        metas = [slot.meta for slot in slots if slot.meta is not None]
        gone = flushed_by(order, metas if ssd is None else [*metas, *ssd.metas()], is_late=is_late)
        store.flushes.carried_out(order, store.ledger.leases.request_ids())
        # Files first: what leaves DRAM is announced as gone, and not as lying there still.
        filed = [] if ssd is None else ssd.remove(gone)
        slots = [slot for slot in slots if slot.key in gone]
        flushed = ChunksFlushed(
            tiers=tuple(
                TierFlush(tier=tier, num_chunks=len(sizes), num_bytes=sum(sizes))
                for tier, sizes in (
                    (Tier.DRAM, [slot.num_bytes for slot in slots]),
                    (Tier.SSD, [meta.num_bytes for meta in filed]),
                )
                if sizes
            ),
            num_leased=sum(slot.num_leases > 0 for slot in slots),
        )
        # Copies that aren't registered first, so that none of them takes the place of the one that is.
        store.withdraw(sorted(slots, key=lambda slot: slot.registered), EvictReason.FLUSH)
        store.tell_flushed(meta.key for meta in filed)
        return flushed

    @property
    def _note(self) -> Path | None:
        return None if self._lower is None else self._lower.ssd.directory.root / "orders"

    async def _note_seq(self) -> None:
        """Keep the number beside the SSD's files, once those that it means are gone."""
        if self._lower is None or self._note is None:
            return
        await self._lower.ssd.settled()
        try:
            await asyncio.to_thread(self._note.write_text, f"{self.seq}\n")
        except OSError as error:
            self._log.warning("the last order's number can't be kept on the SSD", error=error.strerror)


def _read_seq(note: Path | None) -> int:
    """0 where there is none, or none that can be read."""
    try:
        return 0 if note is None else int(note.read_text())
    except (OSError, ValueError):
        return 0
