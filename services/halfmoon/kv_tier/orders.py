"""Carries out the registry's standing orders at one node: pins and flushes.

at start    ask the registry for all of them ──→ only then is what survived on the SSD attached to the store
later       the registry tells (`flush`, `pin`, `unpin`), in the order of their numbers
after a gap, when told `catch_up`, or when the broker is back: ask again for what has been missed
"""

import asyncio
import contextlib
from collections import Counter, defaultdict
from pathlib import Path

import structlog

from halfmoon.bus.endpoint import Envelope, call
from halfmoon.bus.errors import BusError
from halfmoon.bus.protocol import Bus, ConnectionState
from halfmoon.kv_tier.flushes import flushed_by
from halfmoon.kv_tier.slot import Slot
from halfmoon.kv_tier.ssd.lower_tier import LowerTier
from halfmoon.kv_tier.store import ChunkStore
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import EvictReason, Tier
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
_SETTLE_S = 2.0
_STEP_CHUNKS = 256
_DOUBT_S = 1.0
"""So long after a lost connection is back, nothing is handed out before the registry has said what was flushed
meanwhile. Without one the pool then goes on."""


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
        self._carrying_out = asyncio.Lock()
        """Held while flushes are: an order that is told and caught up with at once would be carried out twice, the
        second time on what has been computed since."""
        self._wake = asyncio.Event()
        self._is_current = asyncio.Event()
        """Cleared while orders may have been missed, since the broker couldn't be heard."""
        self._is_current.set()
        self._num_cuts = 0
        self._doubt_until_s: float | None = None
        """None while the broker can't be heard."""
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
                is_current = await self._catch_up()
            except BusError as error:
                if retry_s == _FIRST_RETRY_S:
                    waits = "pins wait" if self._has_looked else "pins and the SSD's content wait"
                    self._log.warning(f"standing orders not known yet: {waits}", error=str(error))
                is_current = False
            if is_current:
                retry_s = _FIRST_RETRY_S
                continue
            self._wake.set()
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _MAX_RETRY_S)

    def hear_connection(self, state: ConnectionState) -> None:
        """To be told whenever the connection to the broker is lost, or back."""
        if state is not ConnectionState.CONNECTED:
            self._is_current.clear()
            self._num_cuts += 1
            self._doubt_until_s = None
        elif not self._is_current.is_set():
            self._doubt_until_s = asyncio.get_running_loop().time() + _DOUBT_S
            self._wake.set()

    async def current(self) -> None:
        """Wait for what was ordered while this node was cut off, so that nothing that was flushed is handed out."""
        if self._is_current.is_set():
            return
        now_s = asyncio.get_running_loop().time()
        left_s = _DOUBT_S if self._doubt_until_s is None else self._doubt_until_s - now_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, left_s)):
                await self._is_current.wait()

    async def flush(self, request: FlushChunks, envelope: Envelope) -> ChunksFlushed:
        async with self._carrying_out:
            self._store.pins.remove(request.unpin)
            flushed = await self._flush(request.order, is_late=False)
            await self._files_are_gone()
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

    async def _catch_up(self) -> bool:
        """False where the answer is older than what has been told here meanwhile: it's to be asked for again.

        An SSD's content is from before this life: it's looked through by all flushes that stand.
        """
        is_first, num_cuts = not self._has_looked, self._num_cuts
        noted_seq = await asyncio.to_thread(_read_seq, self._note) if is_first else 0
        ask = Orders(after=0 if is_first else self.seq)
        told = await call(self._bus, subjects.registry("orders"), ask, StandingOrders, timeout_s=_ASK_TIMEOUT_S)
        async with self._carrying_out:
            return await self._take_in(told, noted_seq, num_cuts, is_first=is_first)

    async def _take_in(self, told: StandingOrders, noted_seq: int, num_cuts: int, *, is_first: bool) -> bool:
        """`noted_seq`: up to where an earlier life had looked through the SSD; `num_cuts`: when it was asked."""
        for order in told.flushes:
            if not (order.is_merged and order.seq <= noted_seq) and (is_first or order.seq > self.seq):
                flushed = await self._flush(order, is_late=True)
                if num_chunks := sum(each.num_chunks for each in flushed.tiers):
                    self._log.info("made up for a missed flush", seq=order.seq, num_chunks=num_chunks)
        if told.seq < self.seq:
            return False
        self._store.pins.replace([pin.key for pin in told.pins])
        self.seq = told.seq
        if not self._has_looked and self._lower is not None:
            self._has_looked = True
            self._store.attach(self._lower)
        self.caught_up.set()
        if num_cuts == self._num_cuts:
            self._is_current.set()
        await self._note_seq()
        return True

    def _reached(self, seq: int) -> None:
        """This order is carried out. Where one before it wasn't, it is asked for."""
        if seq == self.seq + 1:
            self.seq = seq
        elif seq > self.seq:
            self._wake.set()

    async def _flush(self, order: FlushOrder, *, is_late: bool) -> ChunksFlushed:
        """In steps, so that a large pool goes on serving. From the first on, nothing that is meant comes in."""
        store, ssd = self._store, None if self._lower is None else self._lower.ssd
        store.expire()
        store.flushes.carried_out(order, store.ledger.leases.request_ids())
        metas = [slot.meta for slot in store.ledger.slots.readable() if slot.meta is not None]
        metas += [] if ssd is None else ssd.metas()
        gone = await asyncio.to_thread(flushed_by, order, metas, is_late=is_late)
        held: defaultdict[ChunkKey | None, list[tuple[Slot, int]]] = defaultdict(list)
        for slot in store.ledger.slots.readable():
            held[slot.key].append((slot, slot.generation))
        num_leased, num_chunks, num_bytes = 0, Counter[Tier](), Counter[Tier]()
        keys = list(gone)
        for start in range(0, len(keys), _STEP_CHUNKS):
            some = keys[start : start + _STEP_CHUNKS]
            # Files first: what leaves DRAM is announced as gone, and not as lying there still.
            filed = [] if ssd is None else ssd.remove(some)
            slots = [slot for key in some for slot, life in held[key] if slot.readable and slot.generation == life]
            num_leased += sum(slot.num_leases > 0 for slot in slots)
            for tier, sizes in (
                (Tier.DRAM, [slot.num_bytes for slot in slots]),
                (Tier.SSD, [meta.num_bytes for meta in filed]),
            ):
                num_chunks[tier] += len(sizes)
                num_bytes[tier] += sum(sizes)
            # Copies that aren't registered first, so that none of them takes the place of the one that is.
            store.withdraw(sorted(slots, key=lambda slot: slot.registered), EvictReason.FLUSH)
            store.tell_flushed(meta.key for meta in filed)
            await asyncio.sleep(0)
        tiers = (TierFlush(tier=each, num_chunks=num_chunks[each], num_bytes=num_bytes[each]) for each in +num_chunks)
        return ChunksFlushed(tiers=tuple(tiers), num_leased=num_leased)

    @property
    def _note(self) -> Path | None:
        return None if self._lower is None else self._lower.ssd.directory.root / "orders"

    async def _note_seq(self) -> None:
        """Keep the number beside the SSD's files, once those that it means are gone."""
        if self._note is None or not await self._files_are_gone():
            return
        try:
            await asyncio.to_thread(self._note.write_text, f"{self.seq}\n")
        except OSError as error:
            self._log.warning("the last order's number can't be kept on the SSD", error=error.strerror)

    async def _files_are_gone(self) -> bool:
        """Wait for it, a while: a disk that hangs keeps its files, and the next life looks through them again."""
        if self._lower is None:
            return True
        try:
            async with asyncio.timeout(_SETTLE_S):
                await self._lower.ssd.settled()
        except TimeoutError:
            return False
        return True


def _read_seq(note: Path | None) -> int:
    """0 where there is none, or none that can be read."""
    try:
        return 0 if note is None else int(note.read_text())
    except (OSError, ValueError):
        return 0
