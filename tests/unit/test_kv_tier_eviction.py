"""A pool under each eviction policy: the policy has in mind what is registered, and nobody's chunk is taken."""

import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from random import Random

import pytest

from halfmoon.eviction import PolicyName
from halfmoon.kv_tier.events import Announcer, Outbox
from halfmoon.kv_tier.store import ChunkStore
from halfmoon.pool.arena import Arena
from halfmoon.schemas.chunks import ChunkEvent, ChunkMeta, EvictReason
from halfmoon.schemas.ids import ChunkKey, LeaseId, NodeId, RequestId, WorkerId
from halfmoon.schemas.kv_tier import WrittenChunk
from halfmoon.tracing import noop_tracer
from support.pool_nodes import CHUNK_BYTES, SLOT_BYTES

_NUM_SLOTS = 12
_WORKER = WorkerId("w")


class Pool:
    """Serves prompts as a prefill worker has its kv-tier do it."""

    def __init__(self, arena: Arena, policy: PolicyName) -> None:
        async def publish(event: ChunkEvent) -> None:
            return None

        self.now_ns = time.time_ns()
        announcer = Announcer(Outbox(NodeId("n"), 1), publish, lambda error: None)
        self.store = ChunkStore(arena, 1, announcer, noop_tracer(), lambda: self.now_ns, policy)
        self.num_leases = 0

    def open(self, request: RequestId) -> LeaseId:
        self.num_leases += 1
        lease = LeaseId(f"lease-{self.num_leases}")
        self.store.ledger.open_lease(lease, _WORKER, request, self.now_ns + 60_000_000_000)
        return lease

    def serve(self, path: tuple[int, ...]) -> list[LeaseId]:
        """Hold what is cached, and store the rest as far as there is room; the leases stay open."""
        request = RequestId(f"r{self.num_leases}")
        keys = [ChunkKey(bytes(path[:end]).ljust(32, b"\xff")) for end in range(1, len(path) + 1)]
        ledger = self.store.ledger
        cached = [key for key in keys if ledger.slots.find(key) is not None]
        self.store.evictor.asked(request, len(keys), cached, self.now_ns)
        reading, writing = self.open(request), self.open(request)
        for key in cached:
            assert ledger.lease_cached(reading, key, self.now_ns) is not None
        for index, key in enumerate(keys):
            if key in cached:
                continue
            slot = self.store.reserve(writing, key, CHUNK_BYTES)
            if slot is None:
                break
            parent = keys[index - 1] if index else None
            meta = ChunkMeta(
                key=key,
                index=index,
                num_tokens=1,
                num_bytes=CHUNK_BYTES,
                checksum=b"",
                request_id=request,
                created_ns=self.now_ns,
                parent=parent,
            )
            written = WrittenChunk(slot=slot.number, generation=slot.generation, meta=meta, register=True)
            assert self.store.commit(writing, [written], None) == 1
        return [reading, writing]

    def check(self) -> None:
        self.store.ledger.check_integrity()
        assert len(self.store.evictor) == self.store.ledger.slots.num_registered


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    made = Arena.create(tmp_path / "arena", SLOT_BYTES, _NUM_SLOTS)
    yield made
    made.close()


@pytest.fixture(params=list(PolicyName))
def pool(request: pytest.FixtureRequest, arena: Arena) -> Pool:
    return Pool(arena, request.param)


def test_the_policy_keeps_step_with_the_slots(pool: Pool) -> None:
    random = Random(7)
    held: list[list[LeaseId]] = []
    for _ in range(300):
        pool.now_ns += random.choice([0, 1_000, 3_000_000_000])
        leases = pool.store.ledger.leases
        before = {name: set(lease.slots) for name in chain.from_iterable(held) if (lease := leases.get(name))}
        held.append(pool.serve(tuple(random.randrange(3) for _ in range(random.randrange(1, 6)))))
        for name, slots in before.items():
            if lease := leases.get(name):
                assert set(lease.slots) == slots
        pool.check()
        if len(held) > random.randrange(4):
            for name in held.pop(random.randrange(len(held))):
                pool.store.ledger.release(name, pool.now_ns)
        if random.random() < 0.2:
            known = [slot.key for slot in pool.store.ledger.slots.registered() if slot.key is not None]
            pool.store.evictor.set_surplus(random.sample(known, len(known) // 2))
        if random.random() < 0.1:
            readable = list(pool.store.ledger.slots.registered())
            if readable:
                pool.store.withdraw([random.choice(readable)], EvictReason.CORRUPT)
        pool.check()
    assert pool.store.counters.evictions > 50


def test_what_others_hold_too_goes_first_under_each_policy_and_only_what_is_ready(pool: Pool) -> None:
    first, second = pool.serve(tuple(range(6))), pool.serve(tuple(range(20, 26)))
    registered = [slot.key for slot in pool.store.ledger.slots.registered() if slot.key is not None]
    surplus = [registered[0], registered[3], registered[6]]
    for lease in first:
        pool.store.ledger.release(lease, pool.now_ns)
    pool.store.evictor.set_surplus(surplus)
    pool.store.make_room(2)
    left = {slot.key for slot in pool.store.ledger.slots.registered()}
    assert set(registered) - left == set(surplus[:2]), "the third is being read"
    assert pool.store.evictor.num_surplus == 1
    pool.check()
    for lease in second:
        pool.store.ledger.release(lease, pool.now_ns)
    pool.store.make_room(3)
    assert surplus[2] not in {slot.key for slot in pool.store.ledger.slots.registered()}
    assert pool.store.counters.trimmed == 3
    pool.check()


def test_where_all_is_leased_nothing_goes_and_what_is_let_go_can_be_taken(pool: Pool) -> None:
    held = pool.serve(tuple(range(_NUM_SLOTS)))
    assert pool.store.ledger.slots.counts().leased == _NUM_SLOTS
    assert pool.store.reserve(pool.open(RequestId("x")), ChunkKey(b"x" * 32), CHUNK_BYTES) is None
    for lease in held:
        pool.store.ledger.release(lease, pool.now_ns)
    pool.store.make_room(_NUM_SLOTS)
    assert pool.store.ledger.slots.counts().free == _NUM_SLOTS
    pool.check()


def test_the_default_gives_up_the_end_of_a_prompt_before_its_beginning(arena: Arena) -> None:
    pool = Pool(arena, PolicyName.PREFIX_AWARE)
    for lease in pool.serve(tuple(range(_NUM_SLOTS))):
        pool.store.ledger.release(lease, pool.now_ns)
    pool.store.make_room(_NUM_SLOTS - 3)
    kept = [slot.meta.index for slot in pool.store.ledger.slots.registered() if slot.meta is not None]
    assert sorted(kept) == [0, 1, 2]
