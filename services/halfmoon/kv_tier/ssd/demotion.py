"""Demotion: when DRAM is above its high watermark, what the eviction policy would give up next goes to the SSD.

Off the path of requests, in small batches, until DRAM is at its low watermark. A slot whose chunk is being written is
held by a lease, so nothing reuses it; readers may lease it too, and then the chunk stays in DRAM. A request that needs
a slot this moment doesn't wait for any of this: it evicts, as it would without an SSD.
"""

import asyncio
import time

import msgspec

from halfmoon.kv_tier.leases import Lease
from halfmoon.kv_tier.slot import Slot
from halfmoon.kv_tier.ssd.lower_tier import LowerTier
from halfmoon.kv_tier.ssd.reuse import Burst, Pressure, Watermarks, adapted
from halfmoon.kv_tier.state import SlotState
from halfmoon.kv_tier.store import ChunkStore
from halfmoon.schemas.ids import WorkerId, new_lease_id

_NEVER_NS = 2**62
_LOOK_S = 0.02
_HELD_SHARE = 8
"""One slot in so many is being written at a time, at most: the others stay there for requests in a hurry."""
_BURST_LOOKS = 1500
"""After so many looks a burst counts half: about 30 s."""


class Demoter:
    """Its owner runs `run`, and cancels it."""

    def __init__(
        self, store: ChunkStore, lower: LowerTier, *, holder: WorkerId, fixed: Watermarks | None = None
    ) -> None:
        """`fixed`: the watermarks, where they aren't to adapt."""
        self._store = store
        self._lower = lower
        self._ssd = lower.ssd
        self._holder = holder
        self._fixed = fixed
        self._pressure = Pressure()
        self._burst = Burst(_BURST_LOOKS)
        self._batch = max(1, min(2 * lower.ssd.num_writers, store.arena.num_slots // _HELD_SHARE))
        self.watermarks = fixed or adapted(lower.reuse, store.arena.num_slots, 0.0)

    async def run(self) -> None:
        """Never returns."""
        while True:
            if not await self.step():
                await asyncio.sleep(_LOOK_S)

    async def step(self) -> bool:
        """Look, and demote one batch where that is due; whether that has freed anything."""
        counts = self._store.ledger.slots.counts()
        self._burst.look(counts.free)
        if self._fixed is None:
            self.watermarks = adapted(self._lower.reuse, counts.total, self._burst.num_slots)
        excess = self._pressure.num_excess(counts.total - counts.free, counts.total, self.watermarks)
        if not excess or not self._ssd.can_write:
            return False
        numbers = self._store.evictor.victims(min(excess, self._batch))
        to_write = [slot for number in numbers if self._needs_write(slot := self._store.ledger.slots[number])]
        # Held before anything else can run, so that nobody takes these slots before their tasks begin.
        writes = [self._demote(slot, self._hold(slot)) for slot in to_write]
        held = {slot.number for slot in to_write}
        self._store.evict(number for number in numbers if number not in held)
        # The deepest chunks are given up first; they are written last, since what they depend on is worth more.
        await asyncio.gather(*reversed(writes))
        return self._store.ledger.slots.counts().free > counts.free

    def _needs_write(self, slot: Slot) -> bool:
        key = slot.key
        assert key is not None
        if key in self._ssd or self._store.evictor.is_surplus(key):
            return False
        return self._lower.is_worth_writing(key)

    def _hold(self, slot: Slot) -> Lease:
        """A lease that keeps everybody from freeing a ready slot."""
        assert slot.meta is not None
        ledger = self._store.ledger
        lease = ledger.open_lease(new_lease_id(), self._holder, slot.meta.request_id, _NEVER_NS)
        ledger.share(lease, slot, self._store.clock_ns(), is_use=False)
        return lease

    async def _demote(self, slot: Slot, lease: Lease) -> None:
        """Write a held slot's chunk, let go of the slot, and free it unless somebody has used it meanwhile."""
        meta, num_hits = slot.meta, slot.hits
        assert meta is not None
        started_ns = time.time_ns()
        is_written = False
        try:
            is_written = await self._ssd.write(
                msgspec.structs.replace(meta, hits=slot.hits, last_access_ns=slot.last_access_ns),
                slot.traceparent,
                self._store.padded(slot),
            )
        finally:
            is_same = slot.meta is meta and slot.registered
            self._store.ledger.release(lease.lease_id, self._store.clock_ns())
            if is_written and not is_same:
                # It was flushed or found damaged while it was being written.
                self._ssd.remove([meta.key])
        if is_written and is_same and slot.state is SlotState.READY and slot.hits == num_hits:
            self._store.evict([slot.number], started_ns=started_ns)
