"""The network is cut in the middle of a transfer, or the source stands still: bounded, typed, and nothing is kept."""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from halfmoon.bus.codec import Decoder
from halfmoon.bus.protocol import Bus, BusMessage
from halfmoon.pool import PoolClient
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkOutcome
from halfmoon.schemas.ids import NodeId, WorkerId
from halfmoon.schemas.kv_tier import Acquired, ChunkSource
from halfmoon.schemas.requests import Finished
from halfmoon.schemas.splits import KvInbox, KvReady
from support.buses import BusMaker
from support.cut import Proxy
from support.halves import Halves, halves
from support.kv_tier_process import KvTierProcess
from support.nats import NatsServer
from support.pool_nodes import CHUNK_BYTES, REQUEST, content_of, wanted_of, write_chunks
from support.system import System, free_port
from support.wait import until_awaited

pytestmark = [pytest.mark.timeout(300), pytest.mark.nats]

NAMES = ("a", "b", "c", "d")
NUM_SLOTS = 8


@dataclass
class Apart:
    """A node that has chunks, and one on another host that reads them through a network that can be cut."""

    near: PoolClient
    far: PoolClient
    network: Proxy

    async def acquire(self, timeout_s: float) -> Acquired:
        source = ChunkSource(node=NodeId("node-a"), epoch=self.far.info.epoch)
        deadline_ns = time.time_ns() + int(timeout_s * 1e9)
        return await self.near.acquire(
            REQUEST, wanted_of(*NAMES, sources=[source]), keep=False, deadline_ns=deadline_ns
        )

    async def all_reclaimed(self) -> bool:
        near, far = await self.near.stats(), await self.far.stats()
        return (near.free, near.num_leases) == (NUM_SLOTS, 0) and (far.ready, far.num_leases) == (len(NAMES), 0)


@pytest.fixture
async def apart(tmp_path: Path, nats_server: NatsServer, nats_buses: BusMaker) -> AsyncIterator[Apart]:
    shm_dir = tmp_path / "shm"
    shm_dir.mkdir()
    port = free_port()
    settings = {"shm_dir": str(shm_dir), "arena_bytes": str(NUM_SLOTS * 16384)}
    bus: Bus = await nats_buses()
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(Proxy("127.0.0.2", "127.0.0.1", port))
        clients = []
        for node, own in (
            ("node-a", {"bind_port": str(port), "advertised_host": "127.0.0.2"}),
            ("node-c", {"host": "host-2"}),
        ):
            process = KvTierProcess(tmp_path / "data", nats_server.url, node, **settings, **own)
            stack.callback(process.close)
            client = PoolClient(bus, NodeId(node), WorkerId(f"worker-{node}"))
            stack.push_async_callback(client.close)
            await client.wait_ready(20)
            clients.append(client)
        far, near = clients
        await far.release(await write_chunks(far, *NAMES))
        yield Apart(near, far, network)


@pytest.mark.parametrize("drop", [False, True], ids=["hangs", "drops"])
async def test_a_cut_in_the_middle_is_a_typed_miss_in_time_and_the_next_read_is_right(apart: Apart, drop: bool) -> None:
    apart.network.cut_after(2 * CHUNK_BYTES + CHUNK_BYTES // 2, drop=drop)
    began_s = time.monotonic()
    acquired = await apart.acquire(timeout_s=3.0)
    assert time.monotonic() - began_s < 5.0
    assert apart.network.is_cut
    outcomes = [chunk.outcome for chunk in acquired.chunks]
    assert ChunkOutcome.MISS in outcomes
    assert set(outcomes) <= {ChunkOutcome.MISS, ChunkOutcome.HIT_REMOTE}
    for name, chunk in zip(NAMES, acquired.chunks, strict=True):
        if chunk.slot is not None:
            assert bytes(apart.near.payload(chunk.slot)) == content_of(name)
        else:
            assert "node-a" in chunk.detail
    await apart.near.release(acquired.lease_id)
    await until_awaited(apart.all_reclaimed, 20, what="both nodes have everything back")
    apart.network.mend()
    hits: list[Acquired] = []

    async def reads_all() -> bool:
        again = await apart.acquire(timeout_s=10.0)
        await apart.near.release(*(each.lease_id for each in hits))
        hits[:] = [again]
        return all(chunk.outcome is ChunkOutcome.HIT_REMOTE for chunk in again.chunks)

    await until_awaited(reads_all, 20, what="after the pause the path is tried, and works")
    for name, chunk in zip(NAMES, hits[0].chunks, strict=True):
        assert chunk.slot is not None
        assert bytes(apart.near.payload(chunk.slot)) == content_of(name)
    await apart.near.release(hits[0].lease_id)
    await until_awaited(apart.all_reclaimed, 20)


@pytest.fixture
def system(model: Path, tmp_path: Path) -> Iterator[System]:
    settings = {
        "HALFMOON_PREFILL_POOL_TIMEOUT_S": "3",
        "HALFMOON_DECODE_POOL_TIMEOUT_S": "3",
        "HALFMOON_PREFILL_LEASE_S": "3",
        "HALFMOON_DECODE_LEASE_S": "3",
    }
    options = ("--chunk-tokens=64", "--threads=1", "--arena-mib=160", "--transport=tcp")
    system = System.start(tmp_path / "data", model, *options, environ=settings)
    yield system
    assert system.stop() == 0


@pytest.mark.model
@pytest.mark.nightly
async def test_a_source_that_stands_still_costs_time_and_no_token(system: System) -> None:
    """Both of prefill's ways out go through its pool, which stops while its chunks are being read."""
    generator = random.Random(7)
    prompt = [generator.randrange(1000, 40_000) for _ in range(700)]
    pool = system.pid("kv-tier-node-a")
    frozen = asyncio.Event()
    decoder: Decoder[KvInbox] = Decoder(KvInbox)
    async with halves(system.nats_url) as driver:
        expected = await driver.send(prompt, prefill="prefill-1", decode="decode-1", max_tokens=4)

        async def on_ready(message: BusMessage) -> None:
            news = decoder.decode(message.data, message.headers)
            if isinstance(news, KvReady) and news.chunks and not frozen.is_set():
                frozen.set()
                os.kill(pool, signal.SIGSTOP)

        await driver.bus.subscribe(subjects.kv_ready(WorkerId("decode-1")), on_ready)
        try:
            outcome = await driver.send(prompt, prefill="prefill-1", decode="decode-1", max_tokens=4)
        finally:
            os.kill(pool, signal.SIGCONT)
        assert frozen.is_set()
        assert isinstance(outcome.terminal, Finished), outcome.terminal
        assert outcome.tokens == expected.tokens
        assert len(outcome.tokens) == 4
        await until_awaited(lambda: _is_idle(driver), 30, what="slots and leases are back")


async def _is_idle(driver: Halves) -> bool:
    pools = [await driver.pool("node-a"), await driver.pool("node-b")]
    return all((pool.staged, pool.leased, pool.num_leases) == (0, 0, 0) for pool in pools)
