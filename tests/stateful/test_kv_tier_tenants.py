"""Tenants in one pool against what a naive look over all slots says: nobody is evicted below a reserve by another's
hand, nobody is ever above a quota, and who may have a slot gets one."""

import itertools
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from halfmoon.eviction import PolicyName
from halfmoon.kv_tier.events import Announcer, Outbox
from halfmoon.kv_tier.quotas import EVERYBODY, TenantQuotas, TierQuota
from halfmoon.kv_tier.slot import Slot
from halfmoon.kv_tier.state import SlotState
from halfmoon.kv_tier.store import ChunkStore
from halfmoon.pool.arena import Arena
from halfmoon.schemas.chunks import ChunkEvent, ChunkMeta, EvictReason
from halfmoon.schemas.ids import ChunkKey, LeaseId, NodeId, RequestId, TenantId, WorkerId
from halfmoon.schemas.kv_tier import WrittenChunk
from halfmoon.tracing import noop_tracer
from support.pool_nodes import CHUNK_BYTES, SLOT_BYTES

NUM_SLOTS = 10
TENANTS = [TenantId(name) for name in ("kept", "capped", "both", "plain", "stray")]
QUOTAS = {
    "kept": TenantQuotas(dram=TierQuota(reserve_share=0.3)),
    "capped": TenantQuotas(dram=TierQuota(max_bytes=2 * SLOT_BYTES + 5)),
    "both": TenantQuotas(dram=TierQuota(max_share=0.45, max_bytes=9 * SLOT_BYTES, reserve_bytes=2 * SLOT_BYTES - 7)),
}
RESERVED = {TenantId("kept"): 3, TenantId("both"): 2}
"""Slots below which others may not bring them."""
MOST = {TenantId("capped"): 2, TenantId("both"): 4}


class TenantMachine(RuleBasedStateMachine):
    leases = Bundle("leases")

    @initialize(policy=st.sampled_from(PolicyName), most_of_others=st.sampled_from([None, 3]))
    def start(self, policy: PolicyName, most_of_others: int | None) -> None:
        async def publish(event: ChunkEvent) -> None:
            return None

        self.folder = tempfile.TemporaryDirectory()
        self.arena = Arena.create(Path(self.folder.name) / "arena", SLOT_BYTES, NUM_SLOTS)
        self.now_ns = 1
        self.most = dict(MOST)
        quotas = dict(QUOTAS)
        if most_of_others is not None:
            quotas[EVERYBODY] = TenantQuotas(dram=TierQuota(max_bytes=most_of_others * SLOT_BYTES))
            self.most |= dict.fromkeys((TenantId("plain"), TenantId("stray")), most_of_others)
        announcer = Announcer(Outbox(NodeId("n"), 1), publish, lambda error: None)
        self.store = ChunkStore(self.arena, 1, announcer, noop_tracer(), lambda: self.now_ns, policy, quotas)
        self.num_leases = 0

    def teardown(self) -> None:
        if hasattr(self, "arena"):
            self.arena.close()
            self.folder.cleanup()

    def slots(self) -> list[Slot]:
        return [self.store.ledger.slots[number] for number in range(NUM_SLOTS)]

    def held(self) -> Counter[TenantId]:
        return Counter(slot.meta.tenant for slot in self.slots() if slot.registered and slot.meta is not None)

    def num_ready(self, tenant: TenantId) -> int:
        return sum(
            slot.state is SlotState.READY and slot.meta is not None and slot.meta.tenant == tenant
            for slot in self.slots()
        )

    def num_to_be_had(self, tenant: TenantId) -> int:
        """Slots that a request of this tenant can get, free or by eviction."""
        held = self.held()
        free = sum(slot.state is SlotState.FREE for slot in self.slots())
        others = (
            min(self.num_ready(other), max(0, held[other] - RESERVED.get(other, 0)))
            for other in TENANTS
            if other != tenant
        )
        return free + self.num_ready(tenant) + sum(others)

    @contextmanager
    def by_the_hand_of(self, tenant: TenantId) -> Iterator[None]:
        before = self.held()
        yield
        after = self.held()
        for other, reserved in RESERVED.items():
            if other != tenant:
                assert after[other] >= min(before[other], reserved), (other, before, after)

    def open(self, request: RequestId) -> LeaseId:
        self.now_ns += 1
        self.num_leases += 1
        lease = LeaseId(f"lease-{self.num_leases}")
        self.store.ledger.open_lease(lease, WorkerId("w"), request, self.now_ns + 10**12)
        return lease

    @rule(target=leases, tenant=st.sampled_from(TENANTS), path=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def write(self, tenant: TenantId, path: list[int]) -> LeaseId:
        """A prompt: what is cached is held, the rest is stored; tenants share no keys."""
        request = RequestId(f"r{self.num_leases}")
        lease = self.open(request)
        keys = [ChunkKey(f"{tenant} {path[:end]}".encode().ljust(32)) for end in range(1, len(path) + 1)]
        find = self.store.ledger.slots.find
        cached = list(itertools.takewhile(lambda key: find(key) is not None, keys))
        self.store.evictor.asked(request, len(keys), cached, self.now_ns)
        for key in cached:
            assert self.store.ledger.lease_cached(lease, key, self.now_ns) is not None
        new = keys[len(cached) :]
        with self.by_the_hand_of(tenant):
            expected = min(len(new), self.num_to_be_had(tenant))
            self.store.make_room(len(new), tenant)
            slots = [self.store.reserve(lease, key, CHUNK_BYTES, tenant) for key in new]
            assert sum(slot is not None for slot in slots) == expected
            for index, (key, slot) in enumerate(zip(new, slots, strict=True), len(cached)):
                if slot is not None:
                    self.commit(lease, tenant, request, key, keys[index - 1] if index else None, index, slot)
        return lease

    def commit(
        self,
        lease: LeaseId,
        tenant: TenantId,
        request: RequestId,
        key: ChunkKey,
        parent: ChunkKey | None,
        index: int,
        slot: Slot,
    ) -> None:
        held, ready = self.held()[tenant], self.num_ready(tenant)
        there = self.store.ledger.slots.find(key)
        is_new = there is None or not there.registered
        meta = ChunkMeta(
            key=key,
            index=index,
            num_tokens=1,
            num_bytes=CHUNK_BYTES,
            checksum=b"",
            request_id=request,
            created_ns=self.now_ns,
            parent=parent,
            tenant=tenant,
        )
        written = WrittenChunk(slot=slot.number, generation=slot.generation, meta=meta)
        most = self.most.get(tenant)
        fits = is_new and (most is None or held < most or ready > 0)
        assert self.store.commit(lease, [written], None) == int(fits)
        assert slot.readable
        if is_new:
            assert self.held()[tenant] == held + (fits and (most is None or held < most))

    @rule(lease=consumes(leases))
    def release(self, lease: LeaseId) -> None:
        self.now_ns += 1
        before = self.held()
        self.store.ledger.release(lease, self.now_ns)
        assert self.held() == before

    @rule(number=st.integers(0, NUM_SLOTS - 1))
    def withdraw(self, number: int) -> None:
        slot = self.store.ledger.slots[number]
        if slot.readable:
            self.store.withdraw([slot], EvictReason.CORRUPT)

    @rule(num_slots=st.integers(0, NUM_SLOTS))
    def free_for_nobody(self, num_slots: int) -> None:
        """As a watermark does."""
        with self.by_the_hand_of(TenantId("nobody")):
            expected = min(num_slots, self.num_to_be_had(TenantId("nobody")))
            self.store.make_room(num_slots)
            assert self.store.ledger.slots.counts().free >= expected

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.ledger.check_integrity()
        held = self.held()
        assert len(self.store.evictor) == sum(held.values())
        for tenant, most in self.most.items():
            assert held[tenant] <= most
        for tenant in TENANTS:
            assert self.store.ledger.book.used_bytes(tenant) == held[tenant] * SLOT_BYTES


TestTenants = TenantMachine.TestCase
TestTenants.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
