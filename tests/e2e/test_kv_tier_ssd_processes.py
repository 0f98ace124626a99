"""What is on a node's SSD outlives its kv-tier, however that ends: real processes, a real broker, a real directory."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from halfmoon.bus.endpoint import Envelope, read_stream, serve
from halfmoon.bus.errors import BusError, StreamGap
from halfmoon.bus.protocol import Bus
from halfmoon.kv_tier.ssd.file import file_bytes
from halfmoon.pool import PoolClient
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkEvent, ChunkEvicted, ChunkOutcome, ChunkRegistered, NodeCleared, Tier
from halfmoon.schemas.ids import ChunkKey, NodeId, RequestId, WorkerId
from halfmoon.schemas.kv_tier import ChunkSource
from halfmoon.schemas.registry import Orders, StandingOrders
from support.buses import BusMaker
from support.kv_tier_process import KvTierProcess
from support.nats import NatsServer
from support.pool_nodes import CHUNK_BYTES, content_of, key_of, wanted_of, write_chunks
from support.wait import until, until_awaited

pytestmark = pytest.mark.nats

NAMES = {key_of(f"chunk-{number}"): f"chunk-{number}" for number in range(400)}
StartKvTier = Callable[..., KvTierProcess]


@pytest.fixture
def start(tmp_path: Path, nats_server: NatsServer) -> Iterator[StartKvTier]:
    started: list[KvTierProcess] = []
    (tmp_path / "shm").mkdir()

    def start_one(node: str = "node-a", **settings: str) -> KvTierProcess:
        ssd = {
            "shm_dir": str(tmp_path / "shm"),
            "ssd_dir": str(tmp_path / "ssd" / node),
            "ssd_bytes": str(200 * file_bytes(CHUNK_BYTES)),
            "ssd_admission": "all",
            "eviction_policy": "lru",
        }
        started.append(KvTierProcess(tmp_path / "data", nats_server.url, node, **ssd | settings))
        return started[-1]

    yield start_one
    for process in started:
        process.close()


@pytest.fixture
async def bus(nats_buses: BusMaker) -> Bus:
    """With somebody who answers for the registry: nothing is flushed, nothing pinned."""
    made = await nats_buses()

    async def orders(request: Orders, envelope: Envelope) -> StandingOrders:
        return StandingOrders(seq=0, flushes=(), pins=())

    await serve(made, subjects.registry("orders"), Orders, orders)
    return made


@pytest.fixture
async def client(bus: Bus) -> AsyncIterator[PoolClient]:
    made = PoolClient(bus, NodeId("node-a"), WorkerId("worker-a"))
    yield made
    await made.close()


async def follow(bus: Bus, node: str = "node-a") -> dict[ChunkKey, Tier]:
    """What a follower of the stream believes of one node, kept up to date."""
    known: dict[ChunkKey, Tier] = {}

    async def seen(seq: int, event: ChunkEvent) -> None:
        if event.node != node:
            return
        match event:
            case ChunkRegistered():
                known.update({chunk.key: chunk.tier for chunk in event.chunks})
            case ChunkEvicted():
                for key in event.keys:
                    known.pop(key, None)
            case NodeCleared():
                known.clear()

    async def gap(gap: StreamGap) -> None:
        raise AssertionError(gap)

    await read_stream(bus, subjects.CHUNKS_STREAM, ChunkEvent, seen, start_seq=1, on_gap=gap)
    return known


def files(root: Path) -> set[ChunkKey]:
    return {ChunkKey(bytes.fromhex(path.name)) for path in root.glob("chunks/*/*") if path.suffix == ""}


async def write_until_it_dies(client: PoolClient) -> None:
    for name in NAMES.values():
        try:
            await client.release(await write_chunks(client, name, request_id=RequestId(f"req-of-{name}")))
        except (BusError, AssertionError):
            return


async def reads_back(client: PoolClient, *names: str) -> bool:
    acquired = await client.acquire(RequestId("req-reader"), wanted_of(*names))
    for name, chunk in zip(names, acquired.chunks, strict=True):
        if chunk.slot is None:
            return False
        assert bytes(client.payload(chunk.slot)) == content_of(name)
    await client.release(acquired.lease_id)
    return {chunk.outcome for chunk in acquired.chunks} <= {ChunkOutcome.SSD, ChunkOutcome.HIT_LOCAL}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_what_was_demoted_is_announced_and_read_after_a_restart(
    start: StartKvTier, client: PoolClient, bus: Bus, tmp_path: Path, number: signal.Signals
) -> None:
    root = tmp_path / "ssd" / "node-a"
    first = start()
    info = await client.wait_ready(20)
    believed = await follow(bus)
    writing = asyncio.create_task(write_until_it_dies(client))
    await until(lambda: len(files(root)) >= 12, 30, what="demotions under way")
    first.signal(number)
    exit_code = await asyncio.to_thread(first.wait)
    assert exit_code == (0 if number is signal.SIGTERM else -signal.SIGKILL), first.log
    await writing
    left = files(root)
    # Beside what the end itself may have left: files that no kv-tier ever writes.
    torn = next(iter(left))
    (root / "chunks" / torn.hex()[:2] / torn.hex()).write_bytes(b"hm-chunk")
    (root / "chunks" / "00").mkdir(exist_ok=True)
    (root / "chunks" / "00" / "half.new").write_bytes(b"half")
    start()
    again = await client.wait_ready(20)
    assert again.epoch > info.epoch
    expected = left - {torn}
    await until(lambda: believed == dict.fromkeys(expected, Tier.SSD), 20, what="re-announced")
    assert files(root) == expected
    assert not list(root.glob("chunks/*/*.new"))
    for key in expected:
        assert await reads_back(client, NAMES[key])
    stats = (await client.stats()).ssd
    assert stats is not None
    assert stats.removed == {"torn": 1}
    assert (stats.num_chunks, stats.hits, stats.errors) == (len(expected), len(expected), 0)
    await client.release(await write_chunks(client, "new"))
    assert await reads_back(client, "new"), "and it goes on as ever"


async def test_another_host_reads_from_the_ssd_over_tcp(
    start: StartKvTier, client: PoolClient, bus: Bus, nats_buses: BusMaker
) -> None:
    start(host="host-1")
    start("node-b", host="host-2")
    other = PoolClient(await nats_buses(), NodeId("node-b"), WorkerId("worker-b"))
    info = await client.wait_ready(20)
    await other.wait_ready(20)
    believed = await follow(bus)
    names = list(NAMES.values())[:16]
    for name in names:
        await client.release(await write_chunks(client, name, request_id=RequestId(f"req-of-{name}")))
    await until(lambda: Tier.SSD in believed.values())
    name = next(name for name in names if believed.get(key_of(name)) is Tier.SSD)
    source = ChunkSource(node=NodeId("node-a"), epoch=info.epoch)

    async def pulled() -> bool:
        acquired = await other.acquire(RequestId("req-1"), wanted_of(name, sources=[source]), keep=False)
        (chunk,) = acquired.chunks
        assert chunk.slot is not None, chunk.detail
        assert bytes(other.payload(chunk.slot)) == content_of(name)
        assert (chunk.outcome, chunk.transport) == (ChunkOutcome.HIT_REMOTE, "tcp")
        await other.release(acquired.lease_id)
        stats = (await client.stats()).ssd
        return stats is not None and stats.reads >= 1

    assert await pulled()

    async def nothing_is_held() -> bool:
        return (await client.stats()).leased == 0

    await until_awaited(nothing_is_held, what="the staging slot freed")
    await other.close()


async def test_a_second_kv_tier_on_the_same_directory_says_so_and_ends(
    start: StartKvTier, client: PoolClient, bus: Bus, tmp_path: Path
) -> None:
    start()
    await client.wait_ready(20)
    second = start("node-b", ssd_dir=str(tmp_path / "ssd" / "node-a"))
    assert await asyncio.to_thread(second.wait) != 0
    assert "belongs to a live kv-tier" in second.log
    assert "Traceback" not in second.log
