"""The index on both buses: built from the registry, followed on the stream, used for placement, rebuilt after a gap."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import structlog

from halfmoon.bus.codec import encode
from halfmoon.bus.endpoint import serve
from halfmoon.bus.protocol import Bus
from halfmoon.bus.streams import CHUNKS
from halfmoon.chunks.keys import Namespace, chunk_keys
from halfmoon.conductor.indexer import Indexer
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import (
    ChunkEvent,
    ChunkEvicted,
    ChunkMeta,
    ChunkPlacement,
    ChunkRegistered,
    EvictReason,
    NodeCleared,
)
from halfmoon.schemas.ids import ChunkKey, NodeId, RequestId
from halfmoon.schemas.kv_tier import ChunkSource
from halfmoon.schemas.registry import Snapshot, SnapshotPage
from halfmoon.schemas.requests import RequestSubmitted
from halfmoon.schemas.wire import Message
from support.buses import BusMaker
from support.conductors import CARD, MODEL, SPLIT_PAIR, Stage, node_beat
from support.wait import until

PROMPT = tuple(range(1, 70))
KEYS = chunk_keys(Namespace.of(CARD, tenant_salt="default").root(), PROMPT, CARD.chunk_tokens)
NODE = NodeId("node-a")


def registered(*keys: ChunkKey, epoch: int = 1, node: NodeId = NODE) -> ChunkRegistered:
    chunks = tuple(
        ChunkMeta(
            key=key,
            index=0,
            num_tokens=16,
            num_bytes=1024,
            checksum=b"\0" * 16,
            request_id=RequestId("r"),
            created_ns=1,
        )
        for key in keys
    )
    return ChunkRegistered(node=node, epoch=epoch, chunks=chunks)


class FakeRegistry:
    """Serves the snapshot that it is given, one placement a page."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.placements: list[ChunkPlacement] = []
        self.stream_seq = 0
        self.epochs: dict[NodeId, int] = {}
        self.lost: tuple[NodeId, ...] = ()
        self.num_asked = 0

    async def start(self) -> None:
        await serve(self.bus, subjects.registry("snapshot"), Snapshot, self._page)

    async def publish(self, event: ChunkEvent) -> int:
        subject = subjects.evict if isinstance(event, ChunkEvicted) else subjects.chunk_registered
        return await self.bus.stream_publish(subject(event.node), encode(event))

    async def _page(self, ask: Snapshot, envelope: object) -> Message:
        self.num_asked += 1
        at = int(ask.cursor or b"0")
        assert ask.cursor is None or ask.revision == 9
        following = at + 1
        return SnapshotPage(
            revision=9,
            stream_seq=self.stream_seq,
            placements=tuple(self.placements[at:following]),
            cursor=b"%d" % following if following < len(self.placements) else None,
            epochs=self.epochs if ask.cursor is None else {},
            lost=self.lost if ask.cursor is None else (),
        )


@pytest.fixture
async def registry(bus_maker: BusMaker) -> FakeRegistry:
    bus = await bus_maker()
    await bus.ensure_stream(CHUNKS)
    return FakeRegistry(bus)


@pytest.fixture
def live() -> dict[NodeId, int]:
    """The pools whose heartbeats are heard."""
    return {NODE: 1}


@pytest.fixture
async def indexer(bus_maker: BusMaker, registry: FakeRegistry, live: dict[NodeId, int]) -> AsyncIterator[Indexer]:
    indexer = Indexer(
        await bus_maker(),
        structlog.stdlib.get_logger("test"),
        live=lambda: live,
        page_timeout_s=1.0,
        first_retry_s=0.02,
        check_s=0.02,
    )
    running = asyncio.create_task(indexer.run())
    yield indexer
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_snapshot_then_stream_without_gap_or_repeat(registry: FakeRegistry, indexer: Indexer) -> None:
    """The registry comes late: until then the index is empty, and nothing fails."""
    await registry.publish(registered(KEYS[0], KEYS[1], KEYS[2]))
    registry.stream_seq = await registry.publish(registered(KEYS[3]))
    registry.placements = [ChunkPlacement(node=NODE, epoch=1, chunk=chunk) for chunk in registered(*KEYS[1:3]).chunks]
    await registry.publish(ChunkEvicted(node=NODE, epoch=1, keys=(KEYS[1],), reason=EvictReason.CAPACITY))
    assert len(indexer.index) == 0
    assert not indexer.is_current
    await registry.start()
    await until(lambda: indexer.is_current and not indexer.index.nodes_of(KEYS[1]))
    # What the snapshot left out stays out, though the stream still has it: the snapshot is newer.
    assert [bool(indexer.index.nodes_of(key)) for key in KEYS] == [False, False, True, False]
    await registry.publish(registered(KEYS[0]))
    await until(lambda: bool(indexer.index.nodes_of(KEYS[0])))
    await registry.publish(NodeCleared(node=NODE, epoch=2))
    await until(lambda: len(indexer.index) == 0)
    assert indexer.num_rebuilds == 1


async def test_late_events_of_an_older_life_are_refused(registry: FakeRegistry, indexer: Indexer) -> None:
    """The node has cleared before the snapshot, which therefore shows nothing of it but its epoch."""
    registry.stream_seq = await registry.publish(NodeCleared(node=NODE, epoch=2))
    registry.epochs = {NODE: 2}
    await registry.start()
    await until(lambda: indexer.is_current)
    await registry.publish(registered(KEYS[0], epoch=1))
    await registry.publish(registered(KEYS[1], epoch=2))
    await until(lambda: bool(indexer.index.nodes_of(KEYS[1])))
    assert not indexer.index.nodes_of(KEYS[0])


async def test_what_a_lost_node_holds_comes_back_with_it(
    registry: FakeRegistry, indexer: Indexer, live: dict[NodeId, int]
) -> None:
    """The snapshot is taken while the node is lost: its chunks are left out, and the stream won't tell them again."""
    live.clear()
    registry.stream_seq = await registry.publish(registered(*KEYS))
    registry.epochs, registry.lost = {NODE: 1}, (NODE,)
    await registry.start()
    await until(lambda: indexer.is_current)
    assert len(indexer.index) == 0
    assert indexer.num_rebuilds == 1
    # In another epoch it is another pool, of which the stream tells everything.
    live[NODE] = 2
    await registry.publish(registered(KEYS[0], epoch=1))
    await until(lambda: len(indexer.index) == 1)
    assert indexer.num_rebuilds == 1
    # Heard here before the registry has noticed: the snapshot is asked for until it shows the node.
    live[NODE] = 1
    await until(lambda: indexer.num_rebuilds >= 3)
    registry.placements = [ChunkPlacement(node=NODE, epoch=1, chunk=chunk) for chunk in registered(*KEYS).chunks]
    registry.lost = ()
    await until(lambda: len(indexer.index) == len(KEYS))
    num_rebuilds = indexer.num_rebuilds
    await registry.publish(ChunkEvicted(node=NODE, epoch=1, keys=(KEYS[0],), reason=EvictReason.CAPACITY))
    await until(lambda: not indexer.index.nodes_of(KEYS[0]))
    assert indexer.num_rebuilds == num_rebuilds


async def test_a_snapshot_from_before_the_stream_begins_is_asked_for_again(
    registry: FakeRegistry, indexer: Indexer
) -> None:
    registry.stream_seq = 50
    await registry.start()
    await until(lambda: registry.num_asked >= 2)
    assert not indexer.is_current
    registry.stream_seq = 0
    await until(lambda: indexer.is_current)


async def test_placement_uses_what_live_nodes_hold(bus_maker: BusMaker, registry: FakeRegistry) -> None:
    await registry.start()
    await registry.publish(registered(*KEYS[:3], epoch=5))
    stage = await Stage(bus_maker).open(*SPLIT_PAIR)
    try:
        conductor = stage.conductors[0]
        await until(lambda: len(conductor.indexer.index) == 3)

        async def reuse(name: str) -> tuple[tuple[ChunkSource, ...], ...]:
            await stage.client.submit(RequestSubmitted(request_id=RequestId(name), model=MODEL, tokens=PROMPT))
            await until(lambda: any(half.request_id == name for half in stage.workers["p1"].prefills))
            return stage.workers["p1"].prefills[-1].reuse

        assert await reuse("no-pool-heard") == ()
        bus = stage.client.bus
        await bus.publish(subjects.heartbeat(node_beat(NODE, 5).worker), encode(node_beat(NODE, 5)))
        await until(lambda: conductor.members.cluster().nodes == {NODE: 5})
        assert await reuse("warm") == ((ChunkSource(node=NODE, epoch=5),),) * 3
        await bus.publish(subjects.heartbeat(node_beat(NODE, 6).worker), encode(node_beat(NODE, 6)))
        await until(lambda: conductor.members.cluster().nodes == {NODE: 6})
        assert await reuse("restarted") == ()
    finally:
        await stage.close()
