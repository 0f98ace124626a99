"""RDMA between processes: kv-tiers that pull from each other, and a peer that is killed and comes back."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from halfmoon.bus.protocol import Bus
from halfmoon.kv_tier.rdma import BusControl
from halfmoon.pool import PoolClient
from halfmoon.pool.arena import Arena
from halfmoon.schemas.chunks import ChunkOutcome
from halfmoon.schemas.ids import NodeId, WorkerId
from halfmoon.schemas.kv_tier import ChunkSource, NodeInfo
from halfmoon.transport.protocol import ReadOutcome, SliceRead
from halfmoon.transport.rdma.node import RdmaNode
from halfmoon.transport.rdma.reader import RdmaTransport
from support.buses import BusMaker
from support.kv_tier_process import KvTierProcess
from support.nats import NatsServer
from support.pool_nodes import REQUEST, content_of, wanted_of, write_chunks
from support.rdma_peer import GENERATION, GOOD_LEASE, NUM_SLOTS, SECRET, SLOT_BYTES, RdmaPeerProcess, payload
from support.wait import until

pytestmark = [pytest.mark.nats, pytest.mark.timeout(300)]

START_S = 150.0
"""Until a process has started where the processor is emulated."""


@pytest.fixture
async def bus(nats_buses: BusMaker) -> Bus:
    return await nats_buses()


@pytest.fixture
async def transport(devices: RdmaNode, bus: Bus) -> AsyncIterator[RdmaTransport]:
    made = RdmaTransport(devices, BusControl(bus), reader="reader", secret=SECRET)
    yield made
    await made.close()


@pytest.fixture
def kv_tiers(tmp_path: Path, nats_server: NatsServer) -> Iterator[list[KvTierProcess]]:
    """Two nodes on two hosts, that insist on rdma."""
    folder = tmp_path / "shm"
    folder.mkdir()
    settings = {"shm_dir": str(folder), "rdma": "on"}
    started = [
        KvTierProcess(tmp_path / "data", nats_server.url, node, host=host, **settings)
        for node, host in (("node-a", "host-1"), ("node-b", "host-2"))
    ]
    yield started
    for process in started:
        process.close()


async def read_whole(
    transport: RdmaTransport, peer: NodeInfo, slot: int = 0, timeout_s: float = 20
) -> tuple[ReadOutcome, bytes]:
    buffer = bytearray(SLOT_BYTES)
    read = SliceRead(slot, GENERATION, 0, memoryview(buffer))
    deadline_ns = time.time_ns() + int(timeout_s * 1e9)
    (result,) = await transport.read(peer, GOOD_LEASE, [read], deadline_ns=deadline_ns)
    return result.outcome, bytes(buffer)


async def test_kv_tiers_pull_from_each_other_over_rdma(kv_tiers: list[KvTierProcess], bus: Bus) -> None:
    one, other = (PoolClient(bus, NodeId(node), WorkerId(f"worker-{node}")) for node in ("node-a", "node-b"))
    try:
        for client, process in zip((one, other), kv_tiers, strict=True):
            await until(process.has_begun, START_S, what="it serves, or has given up")
            assert process.process.poll() is None, process.log
            await client.wait_ready(START_S)
            assert client.info.rdma is not None, process.log
            assert client.info.rdma.windows
        for writer, reader, names in ((one, other, ("a", "b", "c")), (other, one, ("d", "e"))):
            await writer.release(await write_chunks(writer, *names))
            source = ChunkSource(node=writer.info.node, epoch=writer.info.epoch)
            acquired = await reader.acquire(REQUEST, wanted_of(*names, sources=[source]))
            expected = (ChunkOutcome.HIT_REMOTE, "rdma", "")
            assert [(each.outcome, each.transport, each.detail) for each in acquired.chunks] == [expected] * len(names)
            for name, chunk in zip(names, acquired.chunks, strict=True):
                assert chunk.slot is not None
                assert bytes(reader.payload(chunk.slot)) == content_of(name)
            await reader.release(acquired.lease_id)
    finally:
        await one.close()
        await other.close()


async def test_a_peer_killed_mid_read_ends_the_read_and_its_next_life_is_read(
    transport: RdmaTransport, arena: Arena, tmp_path: Path, nats_server: NatsServer
) -> None:
    first = RdmaPeerProcess(tmp_path, nats_server.url)
    try:
        reads = [SliceRead(each % NUM_SLOTS, GENERATION, 0, arena.slot(each % NUM_SLOTS)) for each in range(2000)]
        deadline_ns = time.time_ns() + 60_000_000_000
        reading = asyncio.create_task(transport.read(first.info, GOOD_LEASE, reads, deadline_ns=deadline_ns))
        await until(lambda: any(arena.slot(NUM_SLOTS - 1)[:64]), 20, what="the first bytes are there")
        first.kill()
        killed_s = time.monotonic()
        results = await asyncio.wait_for(reading, 30)
        assert time.monotonic() - killed_s < 20
        outcomes = [result.outcome for result in results]
        num_ok = outcomes.count(ReadOutcome.OK)
        assert outcomes == [ReadOutcome.OK] * num_ok + [ReadOutcome.UNREACHABLE] * (2000 - num_ok)
        assert num_ok < 2000
        for slot in range(NUM_SLOTS):  # Nobody writes here any more.
            arena.slot(slot)[:] = bytes(SLOT_BYTES)
        assert (await read_whole(transport, first.info))[0] is ReadOutcome.UNREACHABLE
    finally:
        first.close()
    second = RdmaPeerProcess(tmp_path, nats_server.url, epoch=2)
    try:
        assert (await read_whole(transport, first.info)) == (ReadOutcome.STALE, bytes(SLOT_BYTES))
        assert (await read_whole(transport, second.info, 3)) == (ReadOutcome.OK, payload(3, epoch=2))
        assert all(arena.slot(slot) == bytes(SLOT_BYTES) for slot in range(NUM_SLOTS))
    finally:
        second.close()


async def test_a_peer_that_hangs_is_given_up_at_the_deadline(
    transport: RdmaTransport, tmp_path: Path, nats_server: NatsServer
) -> None:
    peer = RdmaPeerProcess(tmp_path, nats_server.url)
    try:
        assert (await read_whole(transport, peer.info)) == (ReadOutcome.OK, payload(0))
        peer.freeze()
        before_s = time.monotonic()
        assert (await read_whole(transport, peer.info, timeout_s=0.5))[0] is ReadOutcome.DEADLINE
        assert 0.45 < time.monotonic() - before_s < 5
        peer.thaw()
        assert (await read_whole(transport, peer.info)) == (ReadOutcome.OK, payload(0))
    finally:
        peer.close()
