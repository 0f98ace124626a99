"""A noisy tenant beside a quiet one, in a kv-tier that is a process of its own on a real broker."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest

from halfmoon.pool import PoolClient
from halfmoon.schemas.ids import NodeId, TenantId, WorkerId
from halfmoon.schemas.pool_stats import TenantUse
from support.buses import BusMaker
from support.kv_tier_process import KvTierProcess
from support.nats import NatsServer
from support.pool_nodes import REQUEST, SLOT_BYTES, wanted_of, write_chunks
from support.system import free_port

pytestmark = pytest.mark.nats

QUIET, NOISY = TenantId("quiet"), TenantId("noisy")
NUM_SLOTS = 12
QUOTAS = '{"quiet": {"dram": {"reserve_share": 0.34}}, "noisy": {"dram": {"max_share": 0.5}}}'
"""Four slots are the quiet one's, six at most the noisy one's."""

Start = Callable[..., KvTierProcess]


@pytest.fixture
def start(tmp_path: Path, nats_server: NatsServer) -> Iterator[Start]:
    started: list[KvTierProcess] = []

    def start_one(**settings: str) -> KvTierProcess:
        own = {"shm_dir": str(tmp_path), "arena_bytes": str(NUM_SLOTS * SLOT_BYTES)}
        process = KvTierProcess(tmp_path / "data", nats_server.url, "node-a", **own, **settings)
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.close()


@pytest.fixture
async def client(nats_buses: BusMaker) -> AsyncIterator[PoolClient]:
    made = PoolClient(await nats_buses(), NodeId("node-a"), WorkerId("worker-a"))
    yield made
    await made.close()


async def found(client: PoolClient, *names: str, tenant: TenantId) -> list[bool]:
    acquired = await client.acquire(REQUEST, wanted_of(*names), tenant=tenant)
    await client.release(acquired.lease_id)
    return [chunk.slot is not None for chunk in acquired.chunks]


async def use_of(client: PoolClient, tenant: TenantId) -> TenantUse:
    return next(row for row in (await client.stats()).tenants if row.tenant == tenant)


async def test_a_flood_of_one_tenant_leaves_another_its_reserve_and_itself_its_quota(
    start: Start, client: PoolClient
) -> None:
    port = free_port()
    start(tenants=QUOTAS, metrics_port=str(port))
    await client.wait_ready(20)
    theirs = [f"quiet {number}" for number in range(4)]
    await client.release(await write_chunks(client, *theirs, tenant=QUIET))
    for number in range(30):
        await client.release(await write_chunks(client, *(f"noisy {number}.{n}" for n in range(3)), tenant=NOISY))
        stats = await client.stats()
        assert stats.total == stats.free + stats.ready
    assert await found(client, *theirs, tenant=QUIET) == [True] * 4
    assert await found(client, *(f"noisy 29.{n}" for n in range(3)), tenant=NOISY) == [True] * 3
    quiet, noisy = await use_of(client, QUIET), await use_of(client, NOISY)
    assert (quiet.num_chunks, quiet.evictions, quiet.hits) == ({"dram": 4}, 0, 4)
    assert (noisy.num_chunks, noisy.evictions, noisy.hits) == ({"dram": 6}, 84, 3)
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
    assert f'halfmoon_kvtier_tenant_held_bytes{{model="",tenant="noisy",tier="dram"}} {6.0 * SLOT_BYTES}' in text
    assert 'halfmoon_kvtier_tenant_chunks_total{kind="evicted",model="",tenant="noisy"} 84.0' in text


async def test_without_quotas_the_same_flood_takes_all(start: Start, client: PoolClient) -> None:
    start()
    await client.wait_ready(20)
    theirs = [f"quiet {number}" for number in range(4)]
    await client.release(await write_chunks(client, *theirs, tenant=QUIET))
    for number in range(30):
        await client.release(await write_chunks(client, *(f"noisy {number}.{n}" for n in range(3)), tenant=NOISY))
    assert await found(client, *theirs, tenant=QUIET) == [False] * 4


async def test_what_is_beyond_a_quota_is_written_and_read_but_not_kept(start: Start, client: PoolClient) -> None:
    """Nine chunks of a tenant that may keep six, all held at once: each can be read while its request has it."""
    start(tenants=QUOTAS)
    await client.wait_ready(20)
    names = [f"noisy {number}" for number in range(9)]
    lease = await write_chunks(client, *names, tenant=NOISY)
    assert await found(client, *names, tenant=NOISY) == [True] * 9
    assert (await use_of(client, NOISY)).num_chunks == {"dram": 6}
    await client.release(lease)
    assert await found(client, *names, tenant=NOISY) == [True] * 6 + [False] * 3
    stats = await client.stats()
    assert (stats.free, stats.ready, stats.num_leases) == (6, 6, 0)


async def test_a_tenant_fills_its_reserve_though_another_was_there_first(start: Start, client: PoolClient) -> None:
    start(tenants='{"quiet": {"dram": {"reserve_share": 0.34}}}')
    await client.wait_ready(20)
    await client.release(await write_chunks(client, *(f"noisy {n}" for n in range(12)), tenant=NOISY))
    for number in range(8):
        leases = await asyncio.gather(
            write_chunks(client, f"quiet {number}", tenant=QUIET), write_chunks(client, f"loud {number}", tenant=NOISY)
        )
        await client.release(*leases)
    assert (await use_of(client, QUIET)).num_chunks["dram"] >= 4


def test_a_kv_tier_with_quotas_that_cannot_be_kept_says_so_and_does_not_start(start: Start) -> None:
    process = start(tenants='{"a": {"dram": {"reserve_share": 0.7}}, "b": {"dram": {"reserve_share": 0.7}}}')
    assert process.wait() == 2
    assert "the reserves of dram add up to" in process.log
    assert "Traceback" not in process.log
