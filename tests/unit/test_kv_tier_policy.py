"""Acquire plans, the slot's life cycle, and leases on a clock of the test's own."""

import itertools

import pytest

from halfmoon.kv_tier.leases import LeaseBook
from halfmoon.kv_tier.ledger import LeaseGone, Ledger, Misfit
from halfmoon.kv_tier.policy import next_source, plan_acquire
from halfmoon.kv_tier.state import SLOT_TABLE, SlotEvent, SlotState
from halfmoon.machine import IllegalTransition, Machine
from halfmoon.schemas.chunks import ChunkMeta
from halfmoon.schemas.ids import ChunkKey, LeaseId, NodeId, RequestId, WorkerId
from halfmoon.schemas.kv_tier import ChunkSource, WantedChunk, WrittenChunk
from halfmoon.transport.protocol import ReadOutcome

KEY = ChunkKey(b"k" * 32)
HOLDER, REQUEST = WorkerId("w"), RequestId("r")


def meta(index: int = 0, key: ChunkKey = KEY, num_bytes: int = 100) -> ChunkMeta:
    return ChunkMeta(
        key=key, index=index, num_tokens=1, num_bytes=num_bytes, checksum=b"", request_id=REQUEST, created_ns=1
    )


@pytest.mark.parametrize(("state", "event"), list(itertools.product(SlotState, SlotEvent)))
def test_the_table_is_all_there_is(state: SlotState, event: SlotEvent) -> None:
    machine = Machine(SLOT_TABLE, state)
    if (state, event) in SLOT_TABLE:
        assert machine.fire(event) is SLOT_TABLE[state, event]
        return
    with pytest.raises(IllegalTransition):
        machine.fire(event)
    assert machine.state is state


def test_every_state_is_reached_from_free_and_leads_back() -> None:
    reached, frontier = {SlotState.FREE}, [SlotState.FREE]
    while frontier:
        here = frontier.pop()
        for (state, _), following in SLOT_TABLE.items():
            if state is here and following not in reached:
                reached.add(following)
                frontier.append(following)
    assert reached == set(SlotState)
    assert SlotState.FREE in SLOT_TABLE.values()


def test_acquire_prefers_local_then_other_nodes() -> None:
    here, there = NodeId("here"), NodeId("there")

    def wanted(name: bytes, *nodes: NodeId) -> WantedChunk:
        sources = tuple(ChunkSource(node=node, epoch=1) for node in nodes)
        return WantedChunk(key=ChunkKey(name * 32), index=0, num_tokens=1, num_bytes=1, sources=sources)

    chunks = [wanted(b"a", there), wanted(b"b", there), wanted(b"c"), wanted(b"d", here), wanted(b"e", here, there)]
    plan = plan_acquire(chunks, {chunks[0].key}, here)
    assert (plan.local, plan.pulls, plan.missing) == ((0,), (1, 4), (2, 3))
    source = next_source(chunks[4].sources, set(), here)
    assert source == ChunkSource(node=there, epoch=1)
    assert next_source(chunks[4].sources, {source}, here) is None


def test_leases_expire_exactly_when_they_say() -> None:
    book = LeaseBook()
    first = book.open(LeaseId("1"), HOLDER, REQUEST, 100)
    second = book.open(LeaseId("2"), HOLDER, REQUEST, 200)
    with pytest.raises(ValueError, match="exists already"):
        book.open(LeaseId("2"), HOLDER, REQUEST, 300)
    assert book.expired(99) == []
    assert book.next_expiry_ns() == 100
    book.renew(first, 300)
    assert book.next_expiry_ns() == 200
    assert book.expired(200) == [second]
    book.renew(first, 250)
    assert book.expired(249) == []
    assert book.expired(250) == [first]
    assert (len(book), book.next_expiry_ns()) == (0, None)


def test_renewing_a_lease_for_ever_does_not_grow_the_book() -> None:
    book = LeaseBook()
    lease = book.open(LeaseId("1"), HOLDER, REQUEST, 1)
    for time_ns in range(2, 5000):
        book.renew(lease, time_ns)
    assert len(book._expiries) < 100
    assert book.expired(4998) == []
    assert book.expired(4999) == [lease]


def test_a_commit_is_all_or_nothing_and_may_be_repeated() -> None:
    ledger = Ledger(3, 4096)
    lease_id = LeaseId("1")
    ledger.open_lease(lease_id, HOLDER, REQUEST, 1000)
    slots = [ledger.reserve(lease_id, ChunkKey(bytes([n]) * 32), 100, 0) for n in range(2)]
    assert slots[0] is not None
    assert slots[1] is not None
    good = WrittenChunk(slot=0, generation=slots[0].generation, meta=meta(key=ChunkKey(bytes(32))))
    late = WrittenChunk(slot=1, generation=slots[1].generation - 1, meta=meta(key=ChunkKey(b"\1" * 32)))
    other = WrittenChunk(slot=1, generation=slots[1].generation, meta=meta())
    huge = WrittenChunk(slot=1, generation=slots[1].generation, meta=meta(key=late.meta.key, num_bytes=4097))
    for bad, error in ((late, LeaseGone), (other, Misfit), (huge, Misfit)):
        with pytest.raises(error):
            ledger.commit(lease_id, [good, bad], 1)
        assert ledger.slots.counts().staged == 2
    assert ledger.commit(lease_id, [good], 1) == [good.meta]
    assert ledger.commit(lease_id, [good], 1) == []
    with pytest.raises(LeaseGone):
        ledger.commit(lease_id, [good], 1000)
    ledger.check_integrity()


@pytest.mark.parametrize("num_bytes", [-1, 0, 4097])
def test_what_fits_no_slot_is_refused(num_bytes: int) -> None:
    ledger = Ledger(1, 4096)
    ledger.open_lease(LeaseId("1"), HOLDER, REQUEST, 1000)
    with pytest.raises(Misfit):
        ledger.reserve(LeaseId("1"), KEY, num_bytes, 0)
    assert ledger.slots.counts().free == 1


def test_a_read_is_refused_for_the_right_reason() -> None:
    ledger = Ledger(2, 4096, first_generation=50)
    ledger.open_lease(LeaseId("1"), HOLDER, REQUEST, 1000)
    ledger.open_lease(LeaseId("2"), HOLDER, REQUEST, 1000)
    reserved = ledger.reserve(LeaseId("1"), KEY, 100, 0)
    assert reserved is not None

    def reason(lease: str, generation: int, end: int, now_ns: int = 1) -> ReadOutcome | None:
        refusal = ledger.refusal(LeaseId(lease), reserved.number, generation, end, now_ns)
        return None if refusal is None else refusal[0]

    assert reason("1", 50, 100) is ReadOutcome.REFUSED, "still being written"
    ledger.commit(LeaseId("1"), [WrittenChunk(slot=0, generation=50, meta=meta(), register=False)], 1)
    assert reason("1", 50, 100) is None
    assert reason("1", 50, 101) is ReadOutcome.REFUSED, "beyond the payload lies what an older chunk left"
    assert reason("1", 49, 100) is ReadOutcome.STALE
    assert reason("2", 50, 100) is ReadOutcome.REFUSED
    assert reason("3", 50, 100) is ReadOutcome.REFUSED
    assert reason("1", 50, 100, now_ns=1000) is ReadOutcome.REFUSED
    ledger.expire(1000)
    assert reason("1", 50, 100) is ReadOutcome.STALE
