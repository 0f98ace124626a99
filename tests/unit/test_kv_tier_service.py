"""A kv-tier on the bus in memory: a real arena, leases, eviction, and its life from start to stop."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from halfmoon.bus.endpoint import call
from halfmoon.bus.errors import BusError, RemoteError
from halfmoon.bus.memory import MemoryBroker, MemoryBus
from halfmoon.lifecycle.runtime import StartupError
from halfmoon.pool import PoolClient
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkEvicted, ChunkOutcome, ChunkRegistered, EvictReason, NodeCleared
from halfmoon.schemas.ids import LeaseId, NodeId, WorkerId
from halfmoon.schemas.kv_tier import Done, NewChunk, Renew, Renewed, Report, Reserve, Reserved
from halfmoon.schemas.wire import ErrorCode
from support.pool_nodes import (
    CHUNK_BYTES,
    REQUEST,
    SLOT_BYTES,
    Node,
    content_of,
    follow,
    key_of,
    running_node,
    slots_of,
)
from support.wait import until

HIT_LOCAL, MISS = ChunkOutcome.HIT_LOCAL, ChunkOutcome.MISS


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def node(broker: MemoryBroker, tmp_path: Path) -> AsyncIterator[Node]:
    async with running_node(broker, tmp_path, "node-a") as running:
        yield running


async def test_what_is_committed_is_acquired_locally_without_moving_a_byte(node: Node) -> None:
    writer = await node.write("a", "b")
    assert slots_of(node) == (6, 0, 0, 2)
    await node.client.release(writer)
    assert slots_of(node) == (6, 0, 2, 0)
    acquired = await node.client.acquire(REQUEST, node.wanted("a", "b", "c"))
    assert [chunk.outcome for chunk in acquired.chunks] == [HIT_LOCAL, HIT_LOCAL, MISS]
    assert [chunk.num_bytes_moved for chunk in acquired.chunks] == [0, 0, 0]
    for name, chunk in zip("ab", acquired.chunks, strict=False):
        assert chunk.slot is not None
        assert bytes(node.client.payload(chunk.slot)) == content_of(name)
        assert node.client.holds(chunk.slot)
    assert acquired.chunks[2].detail
    assert slots_of(node) == (6, 0, 0, 2)
    await node.client.release(acquired.lease_id)
    stats = await node.client.stats()
    assert (stats.hits_local, stats.hits_remote, stats.misses, stats.num_chunks) == (2, 0, 1, 2)
    assert (stats.free, stats.ready, stats.num_leases) == (6, 2, 0)


async def test_a_damaged_chunk_is_withdrawn_and_its_slot_freed_with_its_last_lease(
    node: Node, broker: MemoryBroker
) -> None:
    bus, events = await follow(broker)
    lease = await node.write("x")
    acquired = await node.client.acquire(REQUEST, node.wanted("x"))
    slot = acquired.chunks[0].slot
    assert slot is not None
    node.client.payload(slot)[17] ^= 4
    await node.client.report(key_of("x"), slot)
    await until(lambda: len(events) == 3)
    gone = events[2]
    assert isinstance(gone, ChunkEvicted)
    assert (gone.keys, gone.reason) == ((key_of("x"),), EvictReason.CORRUPT)
    assert slots_of(node) == (7, 0, 0, 1)
    assert node.client.holds(slot)
    # A new copy is a new chunk, whatever becomes of the old one.
    second = await node.write("x")
    await node.client.release(lease, acquired.lease_id)
    assert slots_of(node) == (7, 0, 0, 1)
    await until(lambda: len(events) == 4)
    assert isinstance(events[3], ChunkRegistered)
    await node.client.release(second)
    assert slots_of(node) == (7, 0, 1, 0)
    await bus.close()


async def test_a_report_is_believed_only_where_it_is_true(node: Node, broker: MemoryBroker) -> None:
    bus, events = await follow(broker)
    await node.client.release(await node.write("x"))
    acquired = await node.client.acquire(REQUEST, node.wanted("x"))
    slot = acquired.chunks[0].slot
    assert slot is not None
    subject = f"{subjects.kv_tier(NodeId('node-a'))}.report"

    async def report(name: str, number: int, generation: int) -> None:
        message = Report(key=key_of(name), slot=number, generation=generation)
        await call(bus, subject, message, Done, timeout_s=5)

    await report("x", slot.slot, slot.generation)  # nothing is wrong with it
    node.client.payload(slot)[17] ^= 4
    for name, number, generation in (
        ("y", slot.slot, slot.generation),
        ("x", slot.slot, slot.generation - 1),
        ("x", slot.slot + 1, slot.generation),
        ("x", -1, slot.generation),
        ("x", 10**6, slot.generation),
    ):
        await report(name, number, generation)
    assert slots_of(node) == (7, 0, 0, 1)
    assert node.service.store.ledger.slots.find(key_of("x")) is not None
    await report("x", slot.slot, slot.generation)
    assert node.service.store.ledger.slots.find(key_of("x")) is None
    await node.client.release(acquired.lease_id)
    await until(lambda: any(isinstance(event, ChunkEvicted) for event in events))
    await bus.close()


async def test_a_second_copy_takes_the_place_of_the_first_when_that_goes(node: Node, broker: MemoryBroker) -> None:
    bus, events = await follow(broker)
    first = await node.write("x")
    second, third = await node.write("x"), await node.write("x")
    await node.client.release(first)
    assert slots_of(node) == (5, 0, 1, 2)
    # Room for five is there, a sixth costs the only chunk that nobody holds.
    others = await node.write(*"abcdef")
    acquired = await node.client.acquire(REQUEST, node.wanted("x"))
    assert acquired.chunks[0].outcome is HIT_LOCAL
    assert acquired.chunks[0].slot is not None
    assert bytes(node.client.payload(acquired.chunks[0].slot)) == content_of("x")
    # It stays when its writer lets go; the third copy goes with its own.
    await node.client.release(second, third, others, acquired.lease_id)
    assert slots_of(node) == (1, 0, 7, 0)
    await until(lambda: sum(len(event.chunks) for event in events if isinstance(event, ChunkRegistered)) == 8)
    # Whoever follows the stream still believes that it is here.
    last = [
        type(event)
        for event in events
        if (isinstance(event, ChunkRegistered) and any(chunk.key == key_of("x") for chunk in event.chunks))
        or (isinstance(event, ChunkEvicted) and key_of("x") in event.keys)
    ]
    assert last[-1] is ChunkRegistered
    await bus.close()


async def test_an_expired_lease_frees_its_slots_and_a_late_commit_is_stale(node: Node, broker: MemoryBroker) -> None:
    bus, verbs = MemoryBus(broker), subjects.kv_tier(NodeId("node-a"))
    reserve = Reserve(request_id=REQUEST, holder=WorkerId("stalled"), chunks=(_new("a"), _new("b")), lease_s=0.1)
    reserved = await call(bus, f"{verbs}.reserve", reserve, Reserved, timeout_s=5)
    slot = reserved.chunks[0].slot
    assert slot is not None
    assert node.client.holds(slot)
    assert reserved.expires_ns - time.time_ns() < 100_000_000
    await until(lambda: slots_of(node) == (8, 0, 0, 0), what="the staged slots are free again")
    assert not node.client.holds(slot)
    with pytest.raises(RemoteError) as refused:
        await node.client.commit(reserved.lease_id, [])
    assert refused.value.error.code is ErrorCode.STALE
    renewed = await call(
        bus, f"{verbs}.renew", Renew(lease_ids=(reserved.lease_id,), lease_s=1.0), Renewed, timeout_s=5
    )
    assert renewed.expired == (reserved.lease_id,)
    await node.client.release(await node.write("a"))
    assert (await node.client.stats()).num_chunks == 1
    await bus.close()


def _new(name: str, num_bytes: int = CHUNK_BYTES) -> NewChunk:
    return NewChunk(key=key_of(name), index=0, num_tokens=4, num_bytes=num_bytes)


async def test_leases_are_renewed_until_they_are_released(node: Node) -> None:
    lease = await node.write("a", register=False, lease_s=0.3)
    started = time.monotonic()
    await until(lambda: time.monotonic() - started > 1.0)
    assert node.client.is_open(lease)
    assert slots_of(node) == (7, 0, 0, 1)
    await node.client.release(lease)
    assert slots_of(node) == (8, 0, 0, 0)


async def test_the_first_of_two_writers_wins_and_nothing_leaks(node: Node, broker: MemoryBroker) -> None:
    bus, events = await follow(broker)
    first = await node.write("a")
    second = await node.write("a")
    assert slots_of(node) == (6, 0, 0, 2)
    await node.client.release(first)
    assert slots_of(node) == (6, 0, 1, 1)
    await node.client.release(second)
    assert slots_of(node) == (7, 0, 1, 0)
    await until(lambda: len(events) == 2)
    assert isinstance(events[1], ChunkRegistered)
    assert [chunk.key for chunk in events[1].chunks] == [key_of("a")]
    await bus.close()


async def test_a_full_pool_evicts_the_longest_unused_and_says_so(node: Node, broker: MemoryBroker) -> None:
    bus, events = await follow(broker)
    for name in "abcdefgh":
        await node.client.release(await node.write(name))
    used = await node.client.acquire(REQUEST, node.wanted("a"))
    await node.client.release(used.lease_id)
    held = await node.write("i", "j")
    here = [name for name in "abcdefghij" if node.service.store.ledger.slots.find(key_of(name))]
    assert here == list("adefghij")
    await until(lambda: any(isinstance(event, ChunkRegistered) and len(event.chunks) == 2 for event in events))
    evicted = [key for event in events if isinstance(event, ChunkEvicted) for key in event.keys]
    assert evicted == [key_of("b"), key_of("c")]
    assert {event.reason for event in events if isinstance(event, ChunkEvicted)} == {EvictReason.CAPACITY}
    assert {event.epoch for event in events} == {node.client.info.epoch}
    assert isinstance(events[0], NodeCleared)
    await node.client.release(held)
    await bus.close()


async def test_a_pool_in_use_gives_slots_in_order_and_then_none(node: Node) -> None:
    reserved = await node.client.reserve(REQUEST, [_new(name) for name in "abcdefghij"])
    assert [chunk.slot is not None for chunk in reserved.chunks] == [True] * 8 + [False] * 2
    assert slots_of(node) == (0, 8, 0, 0)
    await node.client.release(reserved.lease_id)
    assert slots_of(node) == (8, 0, 0, 0)


@pytest.mark.parametrize("num_bytes", [0, SLOT_BYTES + 1])
async def test_chunks_that_fit_no_slot_are_refused(node: Node, num_bytes: int) -> None:
    with pytest.raises(RemoteError) as refused:
        await node.client.reserve(REQUEST, [_new("a", num_bytes)])
    assert refused.value.error.code is ErrorCode.INVALID_REQUEST
    assert str(SLOT_BYTES) in refused.value.error.message
    assert slots_of(node) == (8, 0, 0, 0)


@pytest.mark.parametrize("lease_s", [0.0, -1.0])
async def test_a_lease_without_length_is_refused(node: Node, lease_s: float) -> None:
    for ask in (
        node.client.acquire(REQUEST, node.wanted("a"), lease_s=lease_s),
        node.client.reserve(REQUEST, [_new("a")], lease_s=lease_s),
    ):
        with pytest.raises(RemoteError) as refused:
            await ask
        assert refused.value.error.code is ErrorCode.INVALID_REQUEST
    assert slots_of(node) == (8, 0, 0, 0)
    assert len(node.service.store.ledger.leases) == 0


async def test_a_restarted_kv_tier_has_a_new_epoch_and_its_clients_a_new_arena(
    broker: MemoryBroker, tmp_path: Path
) -> None:
    bus = MemoryBus(broker)
    client = PoolClient(bus, NodeId("node-a"), WorkerId("worker"))
    async with running_node(broker, tmp_path, "node-a") as node:
        await node.client.release(await node.write("a"))
        old = await client.acquire(REQUEST, node.wanted("a"))
        old_slot = old.chunks[0].slot
        assert old_slot is not None
        view = client.payload(old_slot)
        assert client.holds(old_slot)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BusError):
        await client.stats()
    async with running_node(broker, tmp_path, "node-a") as node:
        again = await client.acquire(REQUEST, node.wanted("a"))
        assert [chunk.outcome for chunk in again.chunks] == [MISS]
        assert client.info.epoch == node.client.info.epoch
        assert not client.holds(old_slot)
        assert bytes(view) == content_of("a"), "an old view stays what it was"
        await client.close()
    await bus.close()


async def test_a_second_kv_tier_of_the_same_name_does_not_start(
    node: Node, broker: MemoryBroker, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match="served already"):
        async with running_node(broker, tmp_path, "node-a"):
            pass
    assert (await node.client.stats()).total == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arena_bytes": SLOT_BYTES - 1}, "less than one slot"),
        ({"arena_bytes": 1 << 60}, "MiB are free"),
        ({"bind_host": "192.0.2.1"}, "can't serve tcp on 192.0.2.1"),
    ],
)
async def test_what_can_not_start_says_why_and_leaves_nothing(
    broker: MemoryBroker, tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        async with running_node(broker, tmp_path, "node-a", settings=settings):
            pass
    assert list(tmp_path.iterdir()) == []


async def test_a_clean_stop_announces_that_all_is_gone(broker: MemoryBroker, tmp_path: Path) -> None:
    async with running_node(broker, tmp_path, "node-a") as node:
        bus, events = await follow(broker)
        await node.client.release(await node.write("a"))
        await until(lambda: len(events) == 2)
        epoch = node.client.info.epoch
    await until(lambda: len(events) == 3)
    assert isinstance(events[2], NodeCleared)
    assert events[2].epoch > epoch
    await bus.close()


async def test_unknown_leases_are_ignored_by_release_and_reported_by_renew(node: Node) -> None:
    await node.client.release(LeaseId("lease-nobody"))
    with pytest.raises(RemoteError) as refused:
        await node.client.commit(LeaseId("lease-nobody"), [])
    assert refused.value.error.code is ErrorCode.STALE
