"""Slots and leases, kept in step: every operation of a pool, without its effects. Pure; times and ids are passed in.

Each operation first lets expired leases go, so a lease that is over is over, whether or not anybody has swept.
"""

from collections.abc import Callable, Iterable, Sequence

from halfmoon.kv_tier.leases import Lease, LeaseBook
from halfmoon.kv_tier.quotas import Quotas, TierBook
from halfmoon.kv_tier.slot import Slot
from halfmoon.kv_tier.slots import Evicted, SlotTable
from halfmoon.kv_tier.state import SlotState
from halfmoon.schemas.chunks import ChunkMeta, Tier
from halfmoon.schemas.ids import ChunkKey, LeaseId, RequestId, WorkerId
from halfmoon.schemas.kv_tier import WrittenChunk
from halfmoon.transport.protocol import ReadOutcome


class LeaseGone(Exception):
    """The lease has expired or been released, or doesn't hold this slot."""


class Misfit(Exception):
    """A payload that doesn't belong into the slot it is said to be in."""


class Ledger:
    """What a kv-tier knows about its arena."""

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        publish_generation: Callable[[int, int], None] | None = None,
        first_generation: int = 1,
        *,
        publish_readable: Callable[[int, int], None] | None = None,
        publish_lease: Callable[[LeaseId, int | None], None] | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        """The functions are told what readers of the arena may know: see `SlotTable` and `LeaseBook`.

        Raises ValueError for quotas that an arena of this size can't keep.
        """
        self.slot_bytes = slot_bytes
        self.book = TierBook(Tier.DRAM, num_slots * slot_bytes, quotas or {}, chunk_bytes=slot_bytes)
        """What each tenant has registered here."""
        self.slots = SlotTable(num_slots, publish_generation, first_generation, publish_readable, self.book)
        self.leases = LeaseBook(publish_lease)

    def open_lease(self, lease_id: LeaseId, holder: WorkerId, request_id: RequestId, expires_ns: int) -> Lease:
        return self.leases.open(lease_id, holder, request_id, expires_ns)

    def lease_cached(self, lease_id: LeaseId, key: ChunkKey, now_ns: int) -> Slot | None:
        """Lease the slot that holds this chunk; None where the pool doesn't have it. Raises `LeaseGone`."""
        lease = self._live(lease_id, now_ns)
        slot = self.slots.find(key)
        if slot is not None:
            self.share(lease, slot, now_ns)
        return slot

    def share(self, lease: Lease, slot: Slot, now_ns: int, *, is_use: bool = True) -> None:
        """Let this lease hold a readable slot too; nothing changes where it does already."""
        if slot.number not in lease.slots:
            self.slots.lease(slot, now_ns, is_use=is_use)
            lease.slots[slot.number] = slot.generation

    def reserve(self, lease_id: LeaseId, key: ChunkKey, num_bytes: int, now_ns: int) -> Slot | None:
        """A staged slot; None where none is free. Raises `LeaseGone`, and `Misfit` where no slot could hold it."""
        lease = self._live(lease_id, now_ns)
        if not 0 < num_bytes <= self.slot_bytes:
            raise Misfit(f"a chunk of {num_bytes} bytes doesn't fit the pool's slots of {self.slot_bytes}")
        slot = self.slots.reserve(key, num_bytes, now_ns)
        if slot is not None:
            lease.slots[slot.number] = slot.generation
        return slot

    def commit(self, lease_id: LeaseId, chunks: Sequence[WrittenChunk], now_ns: int) -> list[ChunkMeta]:
        """Make written chunks readable, all or none; return those that are newly registered.

        A chunk that this lease has committed before is left as it is, so a repeated commit does no harm. Raises
        `LeaseGone` where a slot isn't held, `Misfit` where it is reserved for something else.
        """
        lease = self._live(lease_id, now_ns)
        slots = [self._written(lease, chunk) for chunk in chunks]
        return [
            chunk.meta
            for slot, chunk in zip(slots, chunks, strict=True)
            if slot.state is SlotState.STAGED
            and self.slots.commit(slot, chunk.meta, register=chunk.register, now_ns=now_ns)
        ]

    def release(self, lease_id: LeaseId, now_ns: int) -> bool:
        """Give a lease back; False where there is none."""
        self.expire(now_ns)
        lease = self.leases.close(lease_id)
        if lease is None:
            return False
        self._let_go(lease, now_ns)
        return True

    def renew(self, lease_id: LeaseId, expires_ns: int, now_ns: int) -> bool:
        """Move a lease's expiry; False where there is none."""
        self.expire(now_ns)
        lease = self.leases.get(lease_id)
        if lease is None:
            return False
        self.leases.renew(lease, expires_ns)
        return True

    def expire(self, now_ns: int) -> list[Lease]:
        """Let go of what has expired; return those leases."""
        gone = self.leases.expired(now_ns)
        for lease in gone:
            self._let_go(lease, now_ns)
        return gone

    def evict(self, numbers: Iterable[int]) -> list[Evicted]:
        """Free these ready slots; return what they held. Raises `IllegalTransition` for a slot that isn't ready."""
        return [self.slots.evict(self.slots[number]) for number in numbers]

    def readable(self, number: int, generation: int, key: ChunkKey) -> Slot | None:
        """The slot, where it still holds this chunk."""
        if not 0 <= number < len(self.slots):
            return None
        slot = self.slots[number]
        return slot if slot.readable and slot.generation == generation and slot.key == key else None

    def refusal(
        self, lease_id: LeaseId, number: int, generation: int, end: int, now_ns: int
    ) -> tuple[ReadOutcome, str] | None:
        """Why this lease may not read this slot up to byte `end`; None where it may.

        Changes nothing, so any thread may ask.
        """
        slot = self.slots[number]
        if slot.generation != generation:
            return ReadOutcome.STALE, f"slot {number} is in generation {slot.generation}, not {generation}"
        lease = self.leases.get(lease_id)
        if lease is None or lease.expires_ns <= now_ns:
            return ReadOutcome.REFUSED, f"lease {lease_id} has expired or never was"
        if number not in lease.slots:
            return ReadOutcome.REFUSED, f"lease {lease_id} doesn't hold slot {number}"
        if not slot.readable:
            return ReadOutcome.REFUSED, f"slot {number} is still being written"
        if end > slot.num_bytes:
            return ReadOutcome.REFUSED, f"slot {number} holds {slot.num_bytes} bytes, {end} were asked for"
        return None

    def check_integrity(self) -> None:
        """Raises AssertionError where slots and leases contradict each other."""
        self.slots.check_integrity()
        held = self.leases.holdings()
        for number in range(len(self.slots)):
            slot = self.slots[number]
            generations = held.get(number, [])
            assert slot.num_leases == len(generations), (slot, generations)
            assert all(generation == slot.generation for generation in generations), (slot, generations)

    def _live(self, lease_id: LeaseId, now_ns: int) -> Lease:
        self.expire(now_ns)
        lease = self.leases.get(lease_id)
        if lease is None:
            raise LeaseGone(f"lease {lease_id} has expired or never was: ask again for what it held")
        return lease

    def _written(self, lease: Lease, chunk: WrittenChunk) -> Slot:
        if lease.slots.get(chunk.slot) != chunk.generation:
            raise LeaseGone(f"lease {lease.lease_id} doesn't hold slot {chunk.slot} in generation {chunk.generation}")
        slot = self.slots[chunk.slot]
        if slot.key != chunk.meta.key:
            raise Misfit(f"slot {chunk.slot} was reserved for another chunk than the one committed into it")
        if not 0 < chunk.meta.num_bytes <= self.slot_bytes:
            raise Misfit(f"a payload of {chunk.meta.num_bytes} bytes in a slot of {self.slot_bytes}")
        return slot

    def _let_go(self, lease: Lease, now_ns: int) -> None:
        for number in lease.slots:
            self.slots.release(self.slots[number], now_ns)
