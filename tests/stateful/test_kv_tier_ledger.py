"""Slots and leases against a naive model: every lease is a set of chunk copies, every copy a plain object."""

import itertools
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from halfmoon.kv_tier.ledger import LeaseGone, Ledger
from halfmoon.kv_tier.state import SlotState
from halfmoon.pool.tables import ArenaTables, table_bytes
from halfmoon.schemas.chunks import ChunkMeta
from halfmoon.schemas.ids import ChunkKey, LeaseId, RequestId, WorkerId
from halfmoon.schemas.kv_tier import WrittenChunk
from halfmoon.transport import shm

NUM_SLOTS = 5
SLOT_BYTES = 4096
KEYS = [ChunkKey(bytes([number]) * 32) for number in range(6)]
HOLDER, REQUEST = WorkerId("writer"), RequestId("req")


def meta_of(key: ChunkKey, num_bytes: int = 100) -> ChunkMeta:
    return ChunkMeta(
        key=key, index=key[0], num_tokens=1, num_bytes=num_bytes, checksum=b"c" * 16, request_id=REQUEST, created_ns=1
    )


@dataclass(eq=False)
class Copy:
    """One chunk in one slot, as the model sees it."""

    key: ChunkKey
    slot: int
    generation: int
    written: bool = False
    registered: bool = False
    pinned: bool = False
    spare_since: int | None = None
    """Number of the commit that came second with a key that was registered already."""


@dataclass(eq=False)
class ModelLease:
    lease_id: LeaseId
    expires_ns: int
    copies: set[Copy] = field(default_factory=set)


class LedgerMachine(RuleBasedStateMachine):
    leases = Bundle("leases")

    @initialize()
    def start(self) -> None:
        self.now_ns = 1_000
        self.generations: dict[int, int] = {}
        self.tables = ArenaTables(memoryview(bytearray(table_bytes(NUM_SLOTS))), NUM_SLOTS)
        """What those who map the arena see."""
        self.ledger = Ledger(
            NUM_SLOTS,
            SLOT_BYTES,
            self.publish_generation,
            publish_readable=self.tables.set_readable_bytes,
            publish_lease=self.tables.set_lease,
        )
        self.copies: set[Copy] = set()
        self.found: dict[ChunkKey, Copy] = {}
        self.live: dict[LeaseId, ModelLease] = {}
        self.num_opened = 0
        self.num_commits = 0
        self.highest: dict[int, int] = dict(self.generations)

    def publish_generation(self, slot: int, generation: int) -> None:
        self.generations[slot] = generation
        self.tables.set_generation(slot, generation)

    def drop(self, gone: ModelLease) -> None:
        del self.live[gone.lease_id]
        for copy in gone.copies:
            held = any(copy in lease.copies for lease in self.live.values())
            if not held and not copy.registered:
                self.forget(copy)

    def forget(self, copy: Copy) -> None:
        self.copies.remove(copy)
        self.unlist(copy)

    def unlist(self, copy: Copy) -> Copy | None:
        """Nobody finds it any more; the oldest spare takes the place of a registered one, and is returned."""
        if self.found.get(copy.key) is copy:
            del self.found[copy.key]
        was_registered = copy.registered
        copy.registered, copy.pinned, copy.spare_since = False, False, None
        spares = [each for each in self.copies if each.key == copy.key and each.spare_since is not None]
        if not was_registered or not spares:
            return None
        heir = min(spares, key=lambda each: each.spare_since or 0)
        heir.registered, heir.spare_since = True, None
        self.found[copy.key] = heir
        return heir

    @rule(target=leases, lasts_ns=st.integers(1, 50))
    def open(self, lasts_ns: int) -> ModelLease:
        self.num_opened += 1
        lease = ModelLease(LeaseId(f"lease-{self.num_opened}"), self.now_ns + lasts_ns)
        self.ledger.open_lease(lease.lease_id, HOLDER, REQUEST, lease.expires_ns)
        self.live[lease.lease_id] = lease
        return lease

    @rule(lease=leases, key=st.sampled_from(KEYS))
    def acquire(self, lease: ModelLease, key: ChunkKey) -> None:
        if lease.lease_id not in self.live:
            try:
                self.ledger.lease_cached(lease.lease_id, key, self.now_ns)
            except LeaseGone:
                return
            raise AssertionError("a lease that is over was honoured")
        slot = self.ledger.lease_cached(lease.lease_id, key, self.now_ns)
        copy = self.found.get(key)
        assert (slot is None) == (copy is None)
        if slot is not None and copy is not None:
            assert (slot.number, slot.generation) == (copy.slot, copy.generation)
            lease.copies.add(copy)

    @rule(lease=leases, key=st.sampled_from(KEYS))
    def reserve(self, lease: ModelLease, key: ChunkKey) -> None:
        if lease.lease_id not in self.live:
            return
        slot = self.ledger.reserve(lease.lease_id, key, 100, self.now_ns)
        assert (slot is None) == (len(self.copies) == NUM_SLOTS)
        if slot is not None:
            assert slot.number not in {copy.slot for copy in self.copies}
            copy = Copy(key, slot.number, slot.generation)
            self.copies.add(copy)
            lease.copies.add(copy)

    @rule(lease=leases, register=st.booleans(), data=st.data())
    def commit(self, lease: ModelLease, register: bool, data: st.DataObject) -> None:
        if not lease.copies:
            return
        copy = data.draw(st.sampled_from(sorted(lease.copies, key=lambda copy: copy.slot)))
        chunk = WrittenChunk(slot=copy.slot, generation=copy.generation, meta=meta_of(copy.key), register=register)
        if lease.lease_id not in self.live:
            try:
                self.ledger.commit(lease.lease_id, [chunk], self.now_ns)
            except LeaseGone:
                return
            raise AssertionError("a commit under a lease that is over was taken")
        registered = self.ledger.commit(lease.lease_id, [chunk], self.now_ns)
        if copy.written:
            assert registered == []
            return
        copy.written = True
        holder = self.found.get(copy.key)
        if holder is None or (register and not holder.registered):
            self.found[copy.key] = copy
            copy.registered = register
        elif register:
            self.num_commits += 1
            copy.spare_since = self.num_commits
        assert [meta.key for meta in registered] == ([copy.key] if copy.registered else [])

    @rule(lease=consumes(leases))
    def release(self, lease: ModelLease) -> None:
        assert self.ledger.release(lease.lease_id, self.now_ns) == (lease.lease_id in self.live)
        if lease.lease_id in self.live:
            self.drop(lease)

    @rule(lease=leases, lasts_ns=st.integers(1, 100))
    def renew(self, lease: ModelLease, lasts_ns: int) -> None:
        expires_ns = self.now_ns + lasts_ns
        assert self.ledger.renew(lease.lease_id, expires_ns, self.now_ns) == (lease.lease_id in self.live)
        lease.expires_ns = expires_ns

    @rule(passed_ns=st.integers(1, 60), sweep=st.booleans())
    def time_passes(self, passed_ns: int, sweep: bool) -> None:
        self.now_ns += passed_ns
        gone = [lease for lease in self.live.values() if lease.expires_ns <= self.now_ns]
        for lease in gone:
            self.drop(lease)
        if sweep:
            assert {each.lease_id for each in self.ledger.expire(self.now_ns)} == {each.lease_id for each in gone}

    @precondition(lambda self: self.copies)
    @rule(num_slots=st.integers(1, 3))
    def evict(self, num_slots: int) -> None:
        self.ledger.expire(self.now_ns)
        held = {copy for lease in self.live.values() for copy in lease.copies}
        idle = {copy.slot: copy for copy in self.copies if copy.registered and not copy.pinned and copy not in held}
        plan = [slot.number for slot in itertools.islice(self.ledger.slots.ready(), num_slots)]
        assert len(plan) == min(num_slots, len(idle))
        assert set(plan) <= set(idle)
        gone = self.ledger.evict(plan)
        assert [each.meta.key for each in gone] == [idle[number].key for number in plan]
        for number, each in zip(plan, gone, strict=True):
            self.forget(idle[number])
            assert (each.successor is None) == (each.meta.key not in self.found)

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        """Its payload was found to be damaged."""
        self.ledger.expire(self.now_ns)
        if not (written := sorted((copy for copy in self.copies if copy.written), key=lambda copy: copy.slot)):
            return
        copy = data.draw(st.sampled_from(written))
        assert self.ledger.readable(copy.slot, copy.generation + 1, copy.key) is None
        slot = self.ledger.readable(copy.slot, copy.generation, copy.key)
        assert slot is not None
        was_registered = copy.registered
        gone = self.ledger.slots.withdraw(slot)
        heir = self.unlist(copy)
        assert (gone is not None) == was_registered
        assert (gone is not None and gone.successor is not None) == (heir is not None)
        if not any(copy in lease.copies for lease in self.live.values()):
            self.copies.remove(copy)

    @rule(key=st.sampled_from(KEYS), pin=st.booleans())
    def pin_or_unpin(self, key: ChunkKey, pin: bool) -> None:
        self.ledger.expire(self.now_ns)
        slot, copy = self.ledger.slots.find(key), self.found.get(key)
        if slot is None or copy is None:
            return
        changed = self.ledger.slots.pin(slot) if pin else self.ledger.slots.unpin(slot)
        assert changed == (copy.registered and copy.pinned != pin)
        copy.pinned = copy.registered and pin

    @rule(lease=leases, data=st.data())
    def read(self, lease: ModelLease, data: st.DataObject) -> None:
        if not lease.copies:
            return
        copy = data.draw(st.sampled_from(sorted(lease.copies, key=lambda copy: copy.slot)))
        refusal = self.ledger.refusal(lease.lease_id, copy.slot, copy.generation, 100, self.now_ns)
        assert (refusal is None) == (lease.lease_id in self.live and copy.written)
        assert self.ledger.refusal(lease.lease_id, copy.slot, copy.generation, 101, self.now_ns) is not None
        for end in (100, 101):
            told = self.ledger.refusal(lease.lease_id, copy.slot, copy.generation, end, self.now_ns)
            seen = shm.refusal(self.tables, lease.lease_id, copy.slot, copy.generation, end, self.now_ns)
            assert (seen and seen[0]) == (told and told[0]), (seen, told)

    @invariant()
    def agrees(self) -> None:
        self.ledger.expire(self.now_ns)
        self.ledger.check_integrity()
        assert self.ledger.slots.counts().free == NUM_SLOTS - len(self.copies)
        assert self.ledger.slots.counts().staged == sum(not copy.written for copy in self.copies)
        assert self.ledger.slots.counts().pinned == sum(copy.pinned for copy in self.copies)
        assert {slot.key for slot in self.ledger.slots.registered()} == {
            copy.key for copy in self.copies if copy.registered
        }
        for number in range(NUM_SLOTS):
            slot = self.ledger.slots[number]
            is_leased = slot.state is SlotState.LEASED or (slot.state is SlotState.PINNED and slot.num_leases > 0)
            leased_bytes = slot.num_bytes if is_leased else 0
            assert self.tables.readable_bytes(number) == leased_bytes
        for lease_id in (LeaseId(f"lease-{number}") for number in range(1, self.num_opened + 1)):
            lease = self.live.get(lease_id)
            assert self.tables.lease_expires_ns(lease_id) == (None if lease is None else lease.expires_ns)
        assert self.tables.num_unlisted_leases == 0
        assert all(self.generations[number] >= seen for number, seen in self.highest.items())
        self.highest.update(self.generations)


LedgerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestLedger = LedgerMachine.TestCase
