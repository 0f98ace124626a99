"""A kv-tier, and two of them, on the bus in memory: real arenas, real transports, exact bytes."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from halfmoon.bus.endpoint import call, read_stream
from halfmoon.bus.errors import BusError, RemoteError, StreamGap
from halfmoon.bus.memory import MemoryBroker, MemoryBus
from halfmoon.kv_tier.peers import BusPeers
from halfmoon.lifecycle.runtime import StartupError
from halfmoon.pool import PoolClient
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkEvent, ChunkEvicted, ChunkOutcome, ChunkRegistered, EvictReason, NodeCleared
from halfmoon.schemas.ids import LeaseId, NodeId, WorkerId
from halfmoon.schemas.kv_tier import (
    Acquire,
    Acquired,
    ChunkSource,
    Done,
    NewChunk,
    Renew,
    Renewed,
    Report,
    Reserve,
    Reserved,
)
from halfmoon.schemas.members import MemberState
from halfmoon.schemas.wire import ErrorCode
from halfmoon.tracing import Context
from support.pool_nodes import CHUNK_BYTES, REQUEST, SLOT_BYTES, Node, content_of, key_of, running_node
from support.wait import until

HIT_LOCAL, HIT_REMOTE = ChunkOutcome.HIT_LOCAL, ChunkOutcome.HIT_REMOTE
MISS, CORRUPT, EXPIRED = ChunkOutcome.MISS, ChunkOutcome.CORRUPT, ChunkOutcome.EXPIRED


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def node(broker: MemoryBroker, tmp_path: Path) -> AsyncIterator[Node]:
    async with running_node(broker, tmp_path, "node-a") as running:
        yield running


@pytest.fixture(params=["shm", "tcp"])
async def pair(
    request: pytest.FixtureRequest, broker: MemoryBroker, tmp_path: Path
) -> AsyncIterator[tuple[Node, Node, str]]:
    """Two nodes that copy what they pull, also where it could be read in place."""
    other_host = "host-1" if request.param == "shm" else "host-2"
    copying = {"read_in_place": False}
    async with (
        running_node(broker, tmp_path, "node-a") as first,
        running_node(broker, tmp_path, "node-b", host=other_host, settings=copying) as second,
    ):
        yield first, second, request.param


def slots_of(node: Node) -> tuple[int, int, int, int]:
    node.service.store.ledger.check_integrity()
    counts = node.service.store.ledger.slots.counts()
    return counts.free, counts.staged, counts.ready, counts.leased


async def follow(broker: MemoryBroker) -> tuple[MemoryBus, list[ChunkEvent]]:
    bus, events = MemoryBus(broker), list[ChunkEvent]()

    async def seen(seq: int, event: ChunkEvent) -> None:
        events.append(event)

    async def gap(gap: StreamGap) -> None:
        raise AssertionError(gap)

    await read_stream(bus, subjects.CHUNKS_STREAM, ChunkEvent, seen, start_seq=1, on_gap=gap)
    return bus, events


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


async def test_a_remote_chunk_is_pulled_once_with_exact_bytes(pair: tuple[Node, Node, str]) -> None:
    first, second, transport = pair
    writer = await first.write("a", "b")
    await first.client.release(writer)
    before_ns = time.time_ns()
    acquired = await second.client.acquire(REQUEST, second.wanted("a", "b", sources=[first.source]), keep=False)
    assert [chunk.outcome for chunk in acquired.chunks] == [HIT_REMOTE, HIT_REMOTE]
    for name, chunk in zip("ab", acquired.chunks, strict=True):
        assert chunk.slot is not None
        assert bytes(second.client.payload(chunk.slot)) == content_of(name)
        assert (chunk.source, chunk.transport, chunk.num_bytes_moved) == (NodeId("node-a"), transport, CHUNK_BYTES)
        assert before_ns <= chunk.started_ns <= chunk.transfer_started_ns <= chunk.finished_ns <= time.time_ns()
        assert chunk.meta is not None
        assert chunk.meta.request_id == REQUEST
    stats = await second.client.stats()
    assert (stats.bytes_pulled, stats.hits_remote) == (2 * CHUNK_BYTES, 2)
    served = await first.client.stats()
    assert served.bytes_served == (2 * CHUNK_BYTES if transport == "tcp" else 0)
    await until(lambda: slots_of(first) == (6, 0, 2, 0), what="the peer's lease given back")
    assert slots_of(second) == (6, 0, 0, 2)
    await second.client.release(acquired.lease_id)
    assert slots_of(second) == (8, 0, 0, 0), "not kept: gone with the lease"


async def test_a_kept_pull_stays_is_announced_and_serves_others(
    pair: tuple[Node, Node, str], broker: MemoryBroker
) -> None:
    first, second, _ = pair
    bus, events = await follow(broker)
    await first.client.release(await first.write("a"))
    acquired = await second.client.acquire(REQUEST, second.wanted("a", sources=[first.source]))
    await second.client.release(acquired.lease_id)
    assert slots_of(second) == (7, 0, 1, 0)
    again = await second.client.acquire(REQUEST, second.wanted("a", sources=[first.source]))
    assert [chunk.outcome for chunk in again.chunks] == [HIT_LOCAL]
    await until(lambda: sum(isinstance(event, ChunkRegistered) for event in events) == 2)
    homes = [event.node for event in events if isinstance(event, ChunkRegistered)]
    assert homes == ["node-a", "node-b"]
    await bus.close()


async def test_unregistered_chunks_are_handed_over_and_never_announced(
    pair: tuple[Node, Node, str], broker: MemoryBroker
) -> None:
    first, second, _ = pair
    bus, events = await follow(broker)
    writer = await first.write("partial", register=False)
    acquired = await second.client.acquire(REQUEST, second.wanted("partial", sources=[first.source]), keep=False)
    assert [chunk.outcome for chunk in acquired.chunks] == [HIT_REMOTE]
    await until(lambda: len(first.service.store.ledger.leases) == 1)
    await first.client.release(writer)
    assert slots_of(first) == (8, 0, 0, 0)
    await second.client.release(acquired.lease_id)
    assert slots_of(second) == (8, 0, 0, 0)
    await until(lambda: len(events) == 2)
    assert [type(event) for event in events] == [NodeCleared, NodeCleared]
    await bus.close()


async def test_damage_at_the_source_is_found_and_not_passed_on(pair: tuple[Node, Node, str]) -> None:
    first, second, _ = pair
    await first.client.release(await first.write("good", "bad"))
    slot = first.service.store.ledger.slots.find(key_of("bad"))
    assert slot is not None
    first.service.store.payload(slot)[5000] ^= 1
    acquired = await second.client.acquire(REQUEST, second.wanted("good", "bad", sources=[first.source]))
    assert [chunk.outcome for chunk in acquired.chunks] == [HIT_REMOTE, CORRUPT]
    assert acquired.chunks[1].slot is None
    assert "checksum" in acquired.chunks[1].detail
    assert slots_of(second) == (7, 0, 0, 1)
    assert second.service.store.ledger.slots.find(key_of("bad")) is None
    # The source was told, has looked for itself, and offers it to nobody any more.
    await until(lambda: slots_of(first) == (7, 0, 1, 0), what="the damaged chunk is withdrawn")
    again = await first.client.acquire(REQUEST, first.wanted("good", "bad"))
    assert [chunk.outcome for chunk in again.chunks] == [HIT_LOCAL, MISS]


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


async def test_a_second_source_makes_up_for_a_bad_first(broker: MemoryBroker, tmp_path: Path) -> None:
    async with (
        running_node(broker, tmp_path, "node-a") as first,
        running_node(broker, tmp_path, "node-b") as second,
        running_node(broker, tmp_path, "node-c", host="host-3") as third,
    ):
        for holder in (first, second):
            await holder.client.release(await holder.write("x", "y"))
        bad = first.service.store.ledger.slots.find(key_of("x"))
        assert bad is not None
        first.service.store.payload(bad)[0] ^= 255
        gone = ChunkSource(node=NodeId("node-gone"), epoch=1)
        old = ChunkSource(node=NodeId("node-a"), epoch=12)
        wanted = third.wanted("x", "y", sources=[gone, old, first.source, second.source])
        acquired = await third.client.acquire(REQUEST, wanted)
        assert [(chunk.outcome, chunk.source) for chunk in acquired.chunks] == [
            (HIT_REMOTE, "node-b"),
            (HIT_REMOTE, "node-a"),
        ]


async def test_no_source_and_unreachable_sources_are_misses(node: Node) -> None:
    gone = ChunkSource(node=NodeId("node-gone"), epoch=1)
    itself = node.source
    acquired = await node.client.acquire(
        REQUEST, [*node.wanted("a"), *node.wanted("b", sources=[gone]), *node.wanted("c", sources=[itself])]
    )
    assert [chunk.outcome for chunk in acquired.chunks] == [MISS] * 3
    assert "node-gone" in acquired.chunks[1].detail
    assert slots_of(node) == (8, 0, 0, 0)


async def test_concurrent_pulls_of_one_chunk_move_it_once(pair: tuple[Node, Node, str]) -> None:
    first, second, _ = pair
    await first.client.release(await first.write("a", "b"))
    wanted = second.wanted("a", "b", sources=[first.source])
    answers = await asyncio.gather(*(second.client.acquire(REQUEST, wanted, keep=number == 3) for number in range(6)))
    outcomes = {chunk.outcome for answer in answers for chunk in answer.chunks}
    assert outcomes <= {HIT_LOCAL, HIT_REMOTE}
    assert {chunk.slot for answer in answers for chunk in answer.chunks[:1]} == {answers[0].chunks[0].slot}
    assert (await second.client.stats()).bytes_pulled == 2 * CHUNK_BYTES
    assert slots_of(second) == (6, 0, 0, 2)
    await second.client.release(*(answer.lease_id for answer in answers))
    assert slots_of(second) == (6, 0, 2, 0), "one of them wanted it kept"


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


class ForgetfulPeers(BusPeers):
    """Real peers, whose lease at the source is over by the time its slots are read."""

    async def acquire(self, node: NodeId, request: Acquire, deadline_ns: int, context: Context) -> Acquired:
        acquired = await super().acquire(node, request, deadline_ns, context)
        await self.release(node, acquired.lease_id, 1.0)
        return acquired


async def test_a_source_lease_that_is_over_before_the_read_is_a_typed_miss(
    pair: tuple[Node, Node, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = pair
    writer = await first.write("a", register=False)
    await first.client.release(await first.write("b"))
    peers = ForgetfulPeers(second.bus)
    monkeypatch.setattr(second.service._puller, "_peers", peers)
    acquired = await second.client.acquire(REQUEST, second.wanted("a", "b", sources=[first.source]))
    # "a" is still in its slot, held by its writer: but not by this lease.
    assert [chunk.outcome for chunk in acquired.chunks] == [EXPIRED] * 2
    assert all(chunk.slot is None for chunk in acquired.chunks)
    await first.client.release(writer)
    await second.client.release(acquired.lease_id)


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


async def test_a_pull_into_a_full_pool_is_a_miss_that_says_so(broker: MemoryBroker, tmp_path: Path) -> None:
    async with (
        running_node(broker, tmp_path, "node-a") as first,
        running_node(broker, tmp_path, "node-b", num_slots=2) as second,
    ):
        await first.client.release(await first.write("a"))
        held = await second.write("x", "y")
        acquired = await second.client.acquire(REQUEST, second.wanted("a", sources=[first.source]))
        assert [chunk.outcome for chunk in acquired.chunks] == [MISS]
        assert "no room" in acquired.chunks[0].detail
        await second.client.release(held, acquired.lease_id)


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


async def test_a_hanging_source_costs_no_more_than_the_deadline(broker: MemoryBroker, tmp_path: Path) -> None:
    silent = MemoryBus(broker)

    async def swallow(message: object) -> None:
        return None

    await silent.subscribe(f"{subjects.kv_tier(NodeId('node-z'))}.*", swallow)
    async with running_node(broker, tmp_path, "node-a") as node:
        wanted = node.wanted("a", sources=[ChunkSource(node=NodeId("node-z"), epoch=5)])
        before = time.monotonic()
        acquired = await node.client.acquire(REQUEST, wanted, deadline_ns=time.time_ns() + 400_000_000)
        assert time.monotonic() - before < 0.6
        assert [chunk.outcome for chunk in acquired.chunks] == [MISS]
        assert slots_of(node) == (8, 0, 0, 0)
    await silent.close()


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


async def test_heartbeat_metrics_and_spans_tell_what_happened(pair: tuple[Node, Node, str]) -> None:
    first, second, transport = pair
    await first.client.release(await first.write("a"))
    await second.client.acquire(REQUEST, second.wanted("a", sources=[first.source]))
    heartbeat = second.service.heartbeat()
    assert (heartbeat.state, heartbeat.epoch, heartbeat.pid) == (
        MemberState.SERVING,
        second.client.info.epoch,
        os.getpid(),
    )
    assert heartbeat.pool is not None
    assert (heartbeat.pool.hits_remote, heartbeat.pool.leased, heartbeat.slot_bytes) == (1, 1, SLOT_BYTES)
    text = generate_latest(second.metrics.registry).decode()
    assert f"halfmoon_kvtier_pulled_bytes_total {float(CHUNK_BYTES)}" in text
    assert 'halfmoon_kvtier_slots{state="leased"} 1.0' in text
    path = f'{{peer="node-a",transport="{transport}"}}'
    assert f"halfmoon_kvtier_path_bytes_total{path} {float(CHUNK_BYTES)}" in text
    assert f"halfmoon_kvtier_path_failures_total{path} 0.0" in text
    assert f"halfmoon_kvtier_path_set_asides_total{path} 0.0" in text
    assert f"halfmoon_kvtier_path_set_aside{path} 0.0" in text
    await until(lambda: {"kvtier.acquire", "kvtier.transfer"} <= {s.name for s in second.spans.get_finished_spans()})
    spans = {span.name: span for span in second.spans.get_finished_spans()}
    moved = dict(spans["kvtier.transfer"].attributes or {})
    assert moved["halfmoon.chunk.key"] == key_of("a").hex()
    assert moved["halfmoon.chunk.bytes"] == CHUNK_BYTES
    assert moved["halfmoon.chunk.transport"] == transport
    assert (moved["halfmoon.chunk.source"], moved["halfmoon.chunk.destination"]) == ("node-a", "node-b")
    assert moved["halfmoon.chunk.outcome"] == "hit_remote"
    parent, span = spans["kvtier.transfer"].parent, spans["kvtier.acquire"].context
    assert parent is not None
    assert span is not None
    assert parent.span_id == span.span_id


async def test_unknown_leases_are_ignored_by_release_and_reported_by_renew(node: Node) -> None:
    await node.client.release(LeaseId("lease-nobody"))
    with pytest.raises(RemoteError) as refused:
        await node.client.commit(LeaseId("lease-nobody"), [])
    assert refused.value.error.code is ErrorCode.STALE
