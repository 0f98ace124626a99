"""Kv-tiers with an SSD whose disk can be told to fail or to hang, and what tests ask and tell of them."""

import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from halfmoon.bus.endpoint import Envelope, serve
from halfmoon.bus.memory import MemoryBroker, MemoryBus
from halfmoon.kv_tier.ssd import open as ssd_open
from halfmoon.kv_tier.ssd.directory import SsdDirectory
from halfmoon.kv_tier.ssd.file import FileBody, file_bytes
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkEvent, ChunkEvicted, ChunkMeta, ChunkOutcome, ChunkRegistered
from halfmoon.schemas.ids import ChunkKey, RequestId
from halfmoon.schemas.kv_tier import AcquiredChunk
from halfmoon.schemas.pool_stats import SsdStats
from halfmoon.schemas.registry import Orders, StandingOrders
from support.pool_nodes import CHUNK_BYTES, Node, content_of, key_of, running_node, write_chunks
from support.wait import until

SSD, HIT_LOCAL, HIT_REMOTE = ChunkOutcome.SSD, ChunkOutcome.HIT_LOCAL, ChunkOutcome.HIT_REMOTE
MISS, CORRUPT = ChunkOutcome.MISS, ChunkOutcome.CORRUPT
FILE = file_bytes(CHUNK_BYTES)
NUM_SLOTS = 8
NAMES = [f"chunk-{number}" for number in range(20)]

StartNode = Callable[..., AbstractAsyncContextManager[Node]]


class Disk(SsdDirectory):
    """A real directory whose disk can be told to fail, or to keep its writers or readers waiting."""

    write_error: int | None = None
    read_error: int | None = None
    may_write = threading.Event()
    may_read = threading.Event()
    num_waiting = 0

    def write(self, body: FileBody, padded: memoryview) -> None:
        if Disk.write_error is not None:
            raise OSError(Disk.write_error, os.strerror(Disk.write_error))
        self._wait(Disk.may_write)
        super().write(body, padded)

    def read(self, key: ChunkKey, padded: memoryview) -> FileBody:
        if Disk.read_error is not None:
            raise OSError(Disk.read_error, os.strerror(Disk.read_error))
        self._wait(Disk.may_read)
        return super().read(key, padded)

    def _wait(self, gate: threading.Event) -> None:
        if not gate.is_set():
            Disk.num_waiting += 1
            gate.wait(20)
            Disk.num_waiting -= 1


@contextmanager
def faulty_disks() -> Iterator[None]:
    """Every SSD tier opened meanwhile lies on a `Disk`."""
    Disk.write_error = Disk.read_error = None
    Disk.num_waiting = 0
    Disk.may_write.set()
    Disk.may_read.set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssd_open, "SsdDirectory", Disk)
        yield
    Disk.may_write.set()
    Disk.may_read.set()


@asynccontextmanager
async def ssd_nodes(broker: MemoryBroker, folder: Path) -> AsyncIterator[StartNode]:
    """Starts nodes whose SSD is a folder of its own, and takes every chunk."""

    @asynccontextmanager
    async def start_one(name: str = "node-a", **settings: object) -> AsyncIterator[Node]:
        ssd: Mapping[str, object] = {
            "ssd_dir": folder / "ssd" / name,
            "ssd_bytes": 100 * FILE,
            "ssd_admission": "all",
            "eviction_policy": "lru",
            "high_watermark": 0.51,
            "low_watermark": 0.5,
        }
        host = settings.pop("host", "host-1")
        async with running_node(
            broker, folder, name, host=str(host), num_slots=NUM_SLOTS, settings={**ssd, **settings}
        ) as running:
            await until(lambda: running.service.store.lower is not None)
            yield running
            running.service.store.check_integrity()

    async def orders(request: Orders, envelope: Envelope) -> StandingOrders:
        return StandingOrders(seq=0, flushes=(), pins=())

    bus = MemoryBus(broker)
    await serve(bus, subjects.registry("orders"), Orders, orders)
    with faulty_disks():
        yield start_one
    await bus.close()


def stats_of(node: Node) -> SsdStats:
    stats = node.service.store.stats(0).ssd
    assert stats is not None
    return stats


def in_dram(node: Node, name: str) -> bool:
    slot = node.service.store.ledger.slots.find(key_of(name))
    return slot is not None and slot.registered


def num_free(node: Node) -> int:
    return node.service.store.ledger.slots.counts().free


async def write(node: Node, *names: str) -> None:
    """Each for a request of its own."""
    for name in names:
        lease = await write_chunks(node.client, name, request_id=RequestId(f"req-of-{name}"))
        await node.client.release(lease)


async def fill(node: Node, *names: str) -> None:
    """Write chunks one by one, as fast as the pool can demote: so none has to be evicted."""
    for name in names:
        await until(lambda: num_free(node) > 1, what="a free slot")
        await write(node, name)
    await until(lambda: num_free(node) >= 4 and node.service.store.ledger.slots.counts().leased == 0)


def below(node: Node) -> list[str]:
    """Those on the SSD only."""
    return [name for name in NAMES if not in_dram(node, name)]


async def read(node: Node, *names: str, by: str = "req-reader", sources: tuple[Node, ...] = ()) -> list[AcquiredChunk]:
    """Acquire and compare every byte; the lease is given back."""
    wanted = node.wanted(*names, sources=[each.source for each in sources])
    acquired = await node.client.acquire(RequestId(by), wanted)
    for name, chunk in zip(names, acquired.chunks, strict=True):
        assert (chunk.slot is None) == (chunk.outcome in (MISS, CORRUPT)), chunk
        if chunk.slot is not None:
            assert bytes(node.client.payload(chunk.slot)) == content_of(name)
            assert chunk.meta is not None
            assert chunk.slot.checksum == chunk.meta.checksum
    await node.client.release(acquired.lease_id)
    return list(acquired.chunks)


def believed(events: list[ChunkEvent]) -> dict[ChunkKey, ChunkMeta]:
    """What a follower of the stream knows of one node."""
    known: dict[ChunkKey, ChunkMeta] = {}
    for event in events:
        match event:
            case ChunkRegistered():
                known.update({chunk.key: chunk for chunk in event.chunks})
            case ChunkEvicted():
                for key in event.keys:
                    known.pop(key, None)
            case _:
                known.clear()
    return known
