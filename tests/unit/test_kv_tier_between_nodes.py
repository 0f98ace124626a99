"""Kv-tiers that pull from each other, on the bus in memory: real arenas, real transports, exact bytes."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from halfmoon.bus.memory import MemoryBroker, MemoryBus
from halfmoon.kv_tier.peers import BusPeers
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkOutcome, ChunkRegistered, NodeCleared
from halfmoon.schemas.ids import NodeId
from halfmoon.schemas.kv_tier import Acquire, Acquired, ChunkSource
from halfmoon.schemas.members import MemberState
from halfmoon.tracing import Context
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
