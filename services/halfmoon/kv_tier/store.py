"""The pool itself: the ledger over an arena, with eviction carried out and changes announced."""

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from halfmoon.eviction import PolicyName, make_policy
from halfmoon.kv_tier.accounts import Accounts
from halfmoon.kv_tier.events import Announcer
from halfmoon.kv_tier.eviction import Evictor
from halfmoon.kv_tier.fates import Fates
from halfmoon.kv_tier.flushes import FlushBook
from halfmoon.kv_tier.ledger import Ledger
from halfmoon.kv_tier.pins import Pins
from halfmoon.kv_tier.quotas import Quotas
from halfmoon.kv_tier.slot import Slot
from halfmoon.kv_tier.slots import Evicted
from halfmoon.kv_tier.ssd.book import SsdChunk
from halfmoon.kv_tier.ssd.lower_tier import LowerTier
from halfmoon.kv_tier.unasked import Unasked
from halfmoon.pool.arena import Arena, aligned
from halfmoon.schemas.chunks import ChunkMeta, EvictReason, Tier
from halfmoon.schemas.ids import ChunkKey, LeaseId, RequestId, TenantId
from halfmoon.schemas.kv_tier import SlotRef, WrittenChunk
from halfmoon.schemas.pool_stats import PoolStats
from halfmoon.tracing import Tracer


@dataclass(slots=True)
class Counters:
    """Since the start."""

    hits_local: int = 0
    hits_remote: int = 0
    misses: int = 0
    evictions: int = 0
    trimmed: int = 0
    """Of the evictions, chunks that enough other nodes held."""
    expired_leases: int = 0
    bytes_pulled: int = 0
    bytes_in_place: int = 0


class ChunkStore:
    """Slots, leases and bytes of one node. Not thread-safe, but for `Ledger.refusal`."""

    def __init__(
        self,
        arena: Arena,
        epoch: int,
        announcer: Announcer,
        tracer: Tracer,
        clock_ns: Callable[[], int] = time.time_ns,
        eviction_policy: PolicyName = PolicyName.PREFIX_AWARE,
        quotas: Quotas | None = None,
        max_pinned_share: float = 0.5,
    ) -> None:
        """Raises ValueError for quotas that an arena of this size can't keep."""
        self.arena = arena
        self.ledger = Ledger(
            arena.num_slots,
            arena.slot_bytes,
            arena.set_generation,
            first_generation=epoch,
            publish_readable=arena.tables.set_readable_bytes,
            publish_lease=arena.tables.set_lease,
            quotas=quotas,
        )
        self.evictor = Evictor(
            lambda: make_policy(eviction_policy, arena.num_slots, ChunkKey),
            self.ledger.slots,
            self.ledger.book,
            arena.slot_bytes,
        )
        self.pins = Pins(self.ledger.slots, int(max_pinned_share * arena.num_slots))
        self.flushes = FlushBook()
        self.counters = Counters()
        self.accounts = Accounts(self.ledger.book)
        self.unasked = Unasked()
        self.lower: LowerTier | None = None
        """None: there is nothing below DRAM, or not yet (`attach`)."""
        self.epoch = epoch
        self.clock_ns = clock_ns
        self._announcer = announcer
        self._fates = Fates(tracer, clock_ns)

    def attach(self, lower: LowerTier) -> None:
        """Use an SSD from now on; what lies on it already is announced."""
        self.lower = lower
        lower.ssd.on_gone = self._gone_from_ssd
        self.accounts.books.append(lower.ssd.book.quotas)
        lower.ssd.book.is_kept = lambda meta: meta.key in self.pins
        self._announcer.registered(lower.ssd.metas())

    def make_room(self, num_slots: int, tenant: TenantId | None = None) -> None:
        """Evict so that this many slots are free, as far as that goes: one plan for many is cheaper than one each."""
        self.evict(self.evictor.victims(num_slots - self.ledger.slots.counts().free, tenant))

    def reserve(self, lease_id: LeaseId, key: ChunkKey, num_bytes: int, tenant: TenantId | None = None) -> Slot | None:
        """A staged slot, evicting where none is free; None where everything is in use, or reserved for other tenants.

        Raises as `Ledger.reserve`.
        """
        now_ns = self.clock_ns()
        slot = self.ledger.reserve(lease_id, key, num_bytes, now_ns)
        if slot is None and self.evict(self.evictor.victims(1, tenant)):
            slot = self.ledger.reserve(lease_id, key, num_bytes, now_ns)
        return slot

    def commit(self, lease_id: LeaseId, chunks: Sequence[WrittenChunk], traceparent: str | None) -> int:
        """Make chunks readable and announce them; return how many were registered. Raises as `Ledger.commit`.

        What is beyond its tenant's quota takes the place of that tenant's own chunks, or isn't registered. What was
        flushed meanwhile isn't either, and nobody finds it.
        """
        lease = self.ledger.leases.get(lease_id)
        stale = {chunk.slot for chunk in chunks if lease is not None and self.is_stale(chunk.meta, lease.request_id)}
        chunks = [msgspec.structs.replace(each, register=False) if each.slot in stale else each for each in chunks]
        self._keep_quotas([chunk.meta for chunk in chunks if chunk.register])
        registered = self.ledger.commit(lease_id, chunks, self.clock_ns())
        for chunk in chunks:
            slot = self.ledger.slots[chunk.slot]
            slot.traceparent = traceparent
            if chunk.slot in stale and not slot.registered:
                self.ledger.slots.withdraw(slot)
            elif chunk.register and not self.ledger.slots.is_registered(chunk.meta.key):
                self.accounts.refused(chunk.meta)
        if registered:
            self._registered(registered, None if lease is None else lease.request_id)
            if self.lower is not None and lease is not None:
                self.lower.registered(registered, lease.request_id)
        return len(registered)

    def promote(self, slot: Slot, request_id: RequestId) -> None:
        """Keep in DRAM what a reader has there as a working copy: beyond its tenant's quota, in the place of that
        tenant's own chunks, or not at all."""
        if slot.meta is None:
            return
        self._keep_quotas([slot.meta])
        if self.ledger.slots.register(slot):
            self._registered([slot.meta], request_id)
            self.promoted(slot)
        else:
            self.accounts.refused(slot.meta)

    def promoted(self, slot: Slot) -> None:
        """Account for a chunk of the SSD that DRAM keeps from now on."""
        if self.lower is not None and slot.meta is not None:
            self.lower.promotions += 1
            self._fates.promoted(slot.meta, slot.traceparent)

    def is_stale(self, meta: ChunkMeta, request_id: RequestId) -> bool:
        """Whether a flush forbids that this chunk, which that request computes or brings here, be found."""
        return self.flushes.is_stale(meta, request_id, self.meta_of)

    def meta_of(self, key: ChunkKey) -> ChunkMeta | None:
        """Of the chunk that readers find under this key."""
        slot = self.ledger.slots.find(key)
        if slot is not None:
            return slot.meta
        return None if self.lower is None else self.lower.find(key)

    def inventory(self, after: ChunkKey | None, limit: int) -> dict[ChunkKey, Tier]:
        """The `limit` smallest keys above `after` that are registered, ascending, each with the best tier it is in."""
        tiers = {} if self.lower is None else {meta.key: Tier.SSD for meta in self.lower.ssd.metas()}
        tiers |= {slot.key: Tier.DRAM for slot in self.ledger.slots.registered() if slot.key is not None}
        keys = heapq.nsmallest(limit, (key for key in tiers if after is None or key > after))
        return {key: tiers[key] for key in keys}

    @property
    def num_untold(self) -> int:
        """Chunks of which the stream has not been told the newest."""
        return self._announcer.outbox.pending

    def retell(self, keys: Iterable[ChunkKey]) -> None:
        """Announce again what is true of these chunks."""
        gone: list[ChunkKey] = []
        here: list[ChunkMeta] = []
        for key in keys:
            slot = self.ledger.slots.find(key)
            if slot is not None and slot.meta is not None and slot.registered:
                here.append(slot.meta)
            elif self.lower is not None and (meta := self.lower.find(key)) is not None:
                here.append(meta)
            else:
                gone.append(key)
        self._announcer.registered(here)
        self._announcer.doubted(gone)

    def withdraw(self, slots: Iterable[Slot], reason: EvictReason) -> None:
        """Offer these readable slots to nobody any more. Those that are held are freed when their holders let go."""
        gone: list[Evicted] = []
        traceparents: list[str | None] = []
        for slot in slots:
            traceparent = slot.traceparent
            if (evicted := self.ledger.slots.withdraw(slot)) is not None:
                gone.append(evicted)
                traceparents.append(traceparent)
        if gone:
            self._tell_gone(gone, traceparents, reason)

    def tell_flushed(self, keys: Iterable[ChunkKey]) -> None:
        """These chunks were on the SSD, and are flushed."""
        self._announcer.evicted(keys, EvictReason.FLUSH)

    def expire(self) -> int:
        """Let go of expired leases; return how many there were."""
        gone = len(self.ledger.expire(self.clock_ns()))
        self.counters.expired_leases += gone
        return gone

    def reference(self, slot: Slot) -> SlotRef:
        """A slot, as messages name it."""
        return SlotRef(
            slot=slot.number,
            generation=slot.generation,
            num_bytes=slot.num_bytes,
            checksum=slot.meta.checksum if slot.meta is not None else b"",
        )

    def payload(self, slot: Slot) -> memoryview:
        return self.arena.slot(slot.number, slot.num_bytes)

    def padded(self, slot: Slot) -> memoryview:
        """The payload, up to the end of its last page."""
        return self.arena.slot(slot.number, aligned(slot.num_bytes))

    def stats(self, bytes_served: int) -> PoolStats:
        counts = self.ledger.slots.counts()
        return PoolStats(
            total=counts.total,
            free=counts.free,
            staged=counts.staged,
            ready=counts.ready,
            leased=counts.leased,
            pinned=counts.pinned,
            pins_refused=self.pins.num_refused,
            num_leases=len(self.ledger.leases),
            num_chunks=self.ledger.slots.num_registered,
            hits_local=self.counters.hits_local,
            hits_remote=self.counters.hits_remote,
            misses=self.counters.misses,
            evictions=self.counters.evictions,
            bytes_pulled=self.counters.bytes_pulled,
            bytes_in_place=self.counters.bytes_in_place,
            bytes_served=bytes_served,
            ssd=None if self.lower is None else self.lower.stats(),
        )

    def check_integrity(self) -> None:
        """Raises AssertionError where what is known of slots, leases and files contradicts itself."""
        self.ledger.check_integrity()
        if self.lower is not None:
            self.lower.ssd.check_integrity()

    def evict(self, numbers: Iterable[int], *, started_ns: int | None = None) -> bool:
        """Free these ready slots, and announce it; False where there are none. Raises as `Ledger.evict`.

        A chunk that has a file on the SSD isn't gone from the node: it is announced as lying there. `started_ns`: when
        the writing of that file began, for the trace.
        """
        plan = list(numbers)
        traceparents = [self.ledger.slots[number].traceparent for number in plan]
        gone = self.ledger.evict(plan)
        if gone:
            if self.lower is not None:
                for each in gone:
                    self.lower.reuse.given_up(each.meta.key)
            self._tell_gone(gone, traceparents, EvictReason.CAPACITY, started_ns=started_ns)
        return bool(gone)

    def _keep_quotas(self, metas: Iterable[ChunkMeta]) -> None:
        """Evict, of each tenant's own, what these chunks would be beyond its quota once they are registered."""
        slots, book = self.ledger.slots, self.ledger.book
        new = Counter(meta.tenant for meta in metas if book.is_apart(meta.tenant) and not slots.is_registered(meta.key))
        for tenant, num_chunks in new.items():
            if excess := book.num_excess(tenant, num_chunks, self.arena.slot_bytes):
                self.evict(self.evictor.own_victims(excess, tenant))

    def _tell_gone(
        self,
        gone: Sequence[Evicted],
        traceparents: Sequence[str | None],
        reason: EvictReason,
        *,
        started_ns: int | None = None,
    ) -> None:
        below = self._stays_below(gone, reason)
        self.counters.evictions += len(gone) - len(below)
        surplus = frozenset(each.meta.key for each in gone if self.evictor.is_surplus(each.meta.key))
        self.counters.trimmed += len(surplus)
        for each in gone:
            if each.meta.key not in below:
                self.accounts.evicted(each.meta)
            if each.successor is None:
                self.unasked.gone(each.meta.key)
        self.evictor.gone(gone, self.clock_ns(), evicted=reason is EvictReason.CAPACITY)
        self._announcer.evicted([each.meta.key for each in gone if each.meta.key not in below], reason)
        if below:
            self._announcer.registered(below.values())
        self.pins.went(each.meta.key for each in gone)
        if successors := [each.successor for each in gone if each.successor is not None]:
            self._announcer.registered(successors)
            self.pins.came(meta.key for meta in successors)
        for each, traceparent in zip(gone, traceparents, strict=True):
            if each.meta.key in below:
                self._fates.demoted(below[each.meta.key], traceparent, started_ns)
            else:
                self._fates.evicted(each.meta, traceparent, reason, is_surplus=each.meta.key in surplus)

    def _stays_below(self, gone: Sequence[Evicted], reason: EvictReason) -> dict[ChunkKey, ChunkMeta]:
        """Of the chunks that DRAM has no more, those that the SSD has; what is flushed stays nowhere."""
        if self.lower is None or reason is EvictReason.FLUSH:
            return {}
        below = self.lower.among(each.meta.key for each in gone if each.successor is None)
        self.lower.demotions += len(below)
        return below

    def _gone_from_ssd(self, gone: Sequence[SsdChunk], reason: EvictReason) -> None:
        """Chunks have left the SSD by themselves. Those that DRAM has too are still here."""
        lost = [each for each in gone if not ((slot := self.ledger.slots.find(each.meta.key)) and slot.registered)]
        self.counters.evictions += len(lost)
        self._announcer.evicted([each.meta.key for each in lost], reason)
        for each in lost:
            self.accounts.evicted(each.meta)
            self._fates.evicted(each.meta, each.traceparent, reason, is_surplus=False)

    def _registered(self, metas: Sequence[ChunkMeta], request_id: RequestId | None) -> None:
        self.evictor.registered(metas, self.clock_ns(), request_id)
        self._announcer.registered(metas)
        self.pins.came(meta.key for meta in metas)
