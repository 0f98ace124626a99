"""Kv-tiers and writers as real processes on a real broker, killed as processes are."""

import asyncio
import itertools
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from halfmoon.bus.codec import Decoder
from halfmoon.bus.endpoint import read_stream
from halfmoon.bus.errors import StreamGap
from halfmoon.bus.protocol import Bus, BusMessage
from halfmoon.engine.sim.tokens import KV_BYTES_PER_TOKEN
from halfmoon.pool import PoolClient
from halfmoon.pool.arena import aligned
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkEvent, ChunkOutcome, ChunkRegistered, NodeCleared
from halfmoon.schemas.ids import NodeId, WorkerId
from halfmoon.schemas.kv_tier import ChunkSource
from halfmoon.schemas.members import MEMBER_LOST_AFTER_S, Heartbeat, MemberState, NodeHeartbeat
from support.buses import BusMaker
from support.kv_tier_process import KvTierProcess
from support.nats import NatsServer
from support.pool_nodes import REQUEST, content_of, key_of, wanted_of, write_chunks
from support.system import clean_environ
from support.wait import until

pytestmark = pytest.mark.nats

WRITER = """
import asyncio, sys
from halfmoon.bus.nats import NatsBus, NatsSettings
from halfmoon.engine.sim.tokens import KV_BYTES_PER_TOKEN
from halfmoon.pool import PoolClient
from halfmoon.pool.arena import aligned
from halfmoon.schemas.ids import ChunkKey, NodeId, RequestId, WorkerId
from halfmoon.schemas.kv_tier import NewChunk

async def main():
    bus = await NatsBus.connect(NatsSettings(url=sys.argv[1]))
    client = PoolClient(bus, NodeId("node-a"), WorkerId("writer"))
    await client.wait_ready(10)
    chunk = NewChunk(key=ChunkKey(bytes.fromhex(sys.argv[2])), index=0, num_tokens=4, num_bytes=10_000)
    reserved = await client.reserve(RequestId("req-dead"), [chunk], lease_s=1.0)
    client.payload(reserved.chunks[0].slot)[:5000] = b"x" * 5000
    print("half written", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""

StartKvTier = Callable[..., KvTierProcess]


@pytest.fixture
def shm_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "shm"
    directory.mkdir()
    return directory


@pytest.fixture
def start(tmp_path: Path, shm_dir: Path, nats_server: NatsServer) -> Iterator[StartKvTier]:
    started: list[KvTierProcess] = []

    def start_one(node: str = "node-a", **settings: str) -> KvTierProcess:
        process = KvTierProcess(tmp_path / "data", nats_server.url, node, **{"shm_dir": str(shm_dir)} | settings)
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.close()


@pytest.fixture
async def bus(nats_buses: BusMaker) -> Bus:
    return await nats_buses()


@pytest.fixture
async def client(bus: Bus) -> AsyncIterator[PoolClient]:
    made = PoolClient(bus, NodeId("node-a"), WorkerId("worker-a"))
    yield made
    await made.close()


async def follow(bus: Bus) -> list[ChunkEvent]:
    events: list[ChunkEvent] = []

    async def seen(seq: int, event: ChunkEvent) -> None:
        events.append(event)

    async def gap(gap: StreamGap) -> None:
        raise AssertionError(gap)

    await read_stream(bus, subjects.CHUNKS_STREAM, ChunkEvent, seen, start_seq=1, on_gap=gap)
    return events


async def test_what_a_killed_kv_tier_left_is_gone_after_the_next_start(
    start: StartKvTier, client: PoolClient, bus: Bus, shm_dir: Path
) -> None:
    first = start()
    info = await client.wait_ready(20)
    events = await follow(bus)
    await client.release(await write_chunks(client, "a"))
    await until(lambda: len(events) == 2)
    assert [path.name for path in shm_dir.iterdir()] == [f"halfmoon-node-a-{info.epoch}"]
    first.signal(signal.SIGKILL)
    first.wait()
    assert len(list(shm_dir.iterdir())) == 1
    start()
    again = await client.wait_ready(20)
    assert again.epoch > info.epoch
    assert [path.name for path in shm_dir.iterdir()] == [f"halfmoon-node-a-{again.epoch}"]
    acquired = await client.acquire(REQUEST, wanted_of("a"))
    assert [chunk.outcome for chunk in acquired.chunks] == [ChunkOutcome.MISS]
    await until(lambda: len(events) == 3)
    assert isinstance(events[2], NodeCleared)
    assert events[2].epoch == again.epoch


async def test_sigterm_leaves_nothing_and_exits_with_zero(
    start: StartKvTier, client: PoolClient, bus: Bus, shm_dir: Path
) -> None:
    process = start()
    info = await client.wait_ready(20)
    events = await follow(bus)
    process.signal(signal.SIGTERM)
    assert process.wait() == 0, process.log
    assert list(shm_dir.iterdir()) == []
    await until(lambda: len(events) == 2)
    assert isinstance(events[1], NodeCleared)
    assert events[1].epoch > info.epoch


async def test_a_writer_killed_mid_put_leaves_nothing_and_its_key_can_be_written_at_once(
    start: StartKvTier, client: PoolClient, nats_server: NatsServer
) -> None:
    start()
    await client.wait_ready(20)
    writer = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        WRITER,
        nats_server.url,
        key_of("a").hex(),
        stdout=asyncio.subprocess.PIPE,
        env=clean_environ(),
    )
    try:
        assert writer.stdout is not None
        assert await asyncio.wait_for(writer.stdout.readline(), 20) == b"half written\n"
    finally:
        writer.kill()
        await writer.communicate()
    assert (await client.stats()).staged == 1
    assert (await client.acquire(REQUEST, wanted_of("a"))).chunks[0].outcome is ChunkOutcome.MISS
    await client.release(await write_chunks(client, "a"))
    acquired = await client.acquire(REQUEST, wanted_of("a"))
    slot = acquired.chunks[0].slot
    assert slot is not None
    assert bytes(client.payload(slot)) == content_of("a")
    await client.release(acquired.lease_id)
    async with asyncio.timeout(20):
        while (stats := await client.stats()).staged:
            continue
    assert (stats.free, stats.ready, stats.leased, stats.num_leases) == (7, 1, 0, 1), "the miss above is a lease too"


async def test_kv_moves_between_processes_over_either_transport(
    start: StartKvTier, client: PoolClient, bus: Bus
) -> None:
    start("node-a")
    start("node-b")
    start("node-c", host="host-2")
    await client.wait_ready(20)
    events = await follow(bus)
    await client.release(await write_chunks(client, "a", "b"))
    source = ChunkSource(node=NodeId("node-a"), epoch=client.info.epoch)
    for node, transport in (("node-b", "shm"), ("node-c", "tcp")):
        other = PoolClient(bus, NodeId(node), WorkerId(f"worker-{node}"))
        await other.wait_ready(20)
        acquired = await other.acquire(REQUEST, wanted_of("a", "b", sources=[source]))
        assert [(c.outcome, c.transport) for c in acquired.chunks] == [(ChunkOutcome.HIT_REMOTE, transport)] * 2
        for name, chunk in zip("ab", acquired.chunks, strict=True):
            assert chunk.slot is not None
            assert bytes(other.payload(chunk.slot)) == content_of(name)
        await other.close()
    await until(lambda: sum(isinstance(event, ChunkRegistered) for event in events) >= 3)


async def test_events_wait_while_the_broker_is_away_and_none_is_lost(
    start: StartKvTier, client: PoolClient, bus: Bus, nats_server: NatsServer
) -> None:
    pool = start()
    await until(pool.has_begun, 30)
    await client.wait_ready(20)
    lease = await write_chunks(client, "a")
    nats_server.kill()
    nats_server.start()
    await client.wait_ready(20)
    await client.release(lease, await write_chunks(client, "b"))
    events = await follow(bus)
    await until(
        lambda: (
            {chunk.key for event in events if isinstance(event, ChunkRegistered) for chunk in event.chunks}
            == {key_of("a"), key_of("b")}
        ),
        timeout_s=20,
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slot_bytes": "none"}, "set slot_bytes, or model"),
        ({"arena_bytes": str(1 << 60)}, "MiB are free"),
        ({"model": "/nowhere", "slot_bytes": "none"}, "there is no model at /nowhere"),
        ({"engine": "none", "slot_bytes": "none", "model": "/nowhere"}, "no engine 'none'"),
        ({"arena_bytes": "many"}, "HALFMOON_KV_TIER_ARENA_BYTES"),
        ({"shm_dir": "/nowhere"}, "/nowhere is no directory"),
    ],
)
def test_bad_settings_end_the_start_with_one_line(
    start: StartKvTier, shm_dir: Path, settings: dict[str, str], message: str
) -> None:
    process = start("node-a", **settings)
    assert process.wait() == 2, process.log
    assert message in process.log
    assert "Traceback" not in process.log
    assert list(shm_dir.iterdir()) == []


async def test_while_a_large_arena_is_made_nobody_takes_it_for_lost(start: StartKvTier, bus: Bus) -> None:
    """A quarter of a million slots: seconds, for arena and table."""
    decoder: Decoder[Heartbeat] = Decoder(Heartbeat)
    beats: list[tuple[float, NodeHeartbeat]] = []

    async def hear(message: BusMessage) -> None:
        beat = decoder.decode(message.data, message.headers)
        assert isinstance(beat, NodeHeartbeat)
        beats.append((time.monotonic(), beat))

    await bus.subscribe(subjects.HEARTBEAT_ALL, hear)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        process = start(slot_bytes="4096", arena_bytes=str(1 << 30), shm_dir=directory)
        await until(lambda: beats and beats[-1][1].state is MemberState.SERVING, 50, what="it serves")
        process.close()
    times = [at_s for at_s, _ in beats]
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) < MEMBER_LOST_AFTER_S
    assert sum(beat.state is MemberState.LOADING for _, beat in beats) > 1
    pool = beats[-1][1].pool
    assert pool is not None
    assert pool.free == pool.total == (1 << 30) // 4096


async def test_the_slots_fit_the_chunks_of_the_engine(start: StartKvTier, client: PoolClient) -> None:
    start(engine="sim", slot_bytes="none", arena_bytes=str(4 << 20), chunk_tokens="128")
    info = await client.wait_ready(20)
    assert info.slot_bytes == aligned(128 * KV_BYTES_PER_TOKEN)
    assert info.num_slots == (4 << 20) // info.slot_bytes


async def test_two_of_one_name_on_a_machine_the_second_is_told(start: StartKvTier, client: PoolClient) -> None:
    start()
    await client.wait_ready(20)
    second = start()
    assert second.wait() == 2
    assert "served already" in second.log
    assert (await client.stats()).total == 8
