"""A conductor learns from the registry what is pinned, and sees to it that there is a second copy."""

import asyncio
from collections.abc import Sequence

import pytest
import structlog

from halfmoon.bus.endpoint import serve
from halfmoon.bus.errors import NoResponders
from halfmoon.bus.memory import MemoryBroker, MemoryBus
from halfmoon.bus.protocol import Bus
from halfmoon.conductor.pins import PinWatch, runs_of
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkMeta, ChunkPlacement
from halfmoon.schemas.ids import ChunkKey, NodeId, RequestId
from halfmoon.schemas.orders import PinOrder
from halfmoon.schemas.registry import LookedUp, Lookup, Orders, StandingOrders
from halfmoon.schemas.wire import Message
from support.pool_nodes import key_of
from support.wait import until


def meta_of(name: str, parent: str | None, index: int = 0) -> ChunkMeta:
    return ChunkMeta(
        key=key_of(name),
        index=index,
        num_tokens=256,
        num_bytes=1000,
        checksum=b"",
        request_id=RequestId("r"),
        created_ns=1,
        parent=None if parent is None else key_of(parent),
    )


class FakeRegistry:
    """Has pins, and one placement of each chunk that exists."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.pins: Sequence[str] = ()
        self.seq = 0
        self.metas: dict[ChunkKey, ChunkMeta] = {}
        self.num_asked = [0, 0]

    async def start(self) -> None:
        await serve(self.bus, subjects.registry("orders"), Orders, self._orders)
        await serve(self.bus, subjects.registry("lookup"), Lookup, self._lookup)

    async def _orders(self, ask: Orders, envelope: object) -> Message:
        self.num_asked[0] += 1
        return StandingOrders(seq=self.seq, flushes=(), pins=tuple(PinOrder(key=key_of(name)) for name in self.pins))

    async def _lookup(self, ask: Lookup, envelope: object) -> Message:
        self.num_asked[1] += 1
        found = (self.metas.get(key) for key in ask.keys)
        return LookedUp(
            placements=tuple(
                () if meta is None else (ChunkPlacement(node=NodeId("a"), epoch=1, chunk=meta),) for meta in found
            )
        )


def test_runs_begin_at_the_first_pinned_chunk_and_end_where_no_other_follows() -> None:
    metas = [
        meta_of("a", "not pinned"),
        meta_of("b", "a"),
        meta_of("c", "b"),
        meta_of("x", "b"),
        meta_of("alone", None),
    ]
    runs = runs_of({meta.key: meta for meta in metas})
    assert {run.keys for run in runs} == {
        (key_of("a"), key_of("b"), key_of("c")),
        (key_of("a"), key_of("b"), key_of("x")),
        (key_of("alone"),),
    }
    assert {(run.num_tokens, run.num_bytes) for run in runs} == {(256, 1000)}


async def test_the_registry_is_asked_when_there_is_news_and_for_what_nobody_had() -> None:
    broker, latest = MemoryBroker(), 0
    registry = FakeRegistry(MemoryBus(broker))
    pins = PinWatch(MemoryBus(broker), structlog.stdlib.get_logger("test"), lambda: latest)
    await pins.look()
    assert not pins.runs
    latest = registry.seq = 7
    with pytest.raises(NoResponders):
        await pins.look()
    await registry.start()
    registry.pins = ["a", "b"]
    registry.metas = {key_of("a"): meta_of("a", None)}
    await pins.look()
    assert [run.keys for run in pins.runs] == [(key_of("a"),)]
    registry.metas[key_of("b")] = meta_of("b", "a")
    await pins.look()
    await pins.look()
    assert [run.keys for run in pins.runs] == [(key_of("a"), key_of("b"))]
    assert registry.num_asked == [1, 2]
    latest = registry.seq = 8
    registry.pins = []
    running = asyncio.create_task(pins.run())
    await until(lambda: not pins.runs)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
