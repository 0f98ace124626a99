"""Registries and etcd killed, and etcd compacted, while pools write and evict: real processes on real NATS.

What etcd says afterwards is compared with the pools' own inventories: nothing stale, nothing lost.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from halfmoon.bus.endpoint import call
from halfmoon.bus.protocol import Bus
from halfmoon.pool import PoolClient
from halfmoon.registry.etcd import Etcd
from halfmoon.registry.store import Store
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import NodeId, WorkerId
from halfmoon.schemas.registry import Snapshot, SnapshotPage
from support.buses import BusMaker
from support.etcd import EtcdServer
from support.kv_tier_process import KvTierProcess
from support.nats import NatsServer
from support.pool_nodes import write_chunks
from support.registry import CALL_TIMEOUT_S, etcd_agrees, eventually, inventory
from support.registry_process import RegistryProcess
from support.wait import until

pytestmark = [pytest.mark.etcd, pytest.mark.nats, pytest.mark.timeout(150)]

NODES = ("a", "b")


class Load:
    """Writes into every pool; each has eight slots, so that every chunk written evicts another."""

    def __init__(self, pools: dict[str, PoolClient]) -> None:
        self.num_written = 0
        self._is_over = False
        self._tasks = [asyncio.create_task(self._write(pool)) for pool in pools.values()]

    async def _write(self, pool: PoolClient) -> None:
        while not self._is_over:
            name = secrets.token_hex(8)
            await pool.release(await write_chunks(pool, name, f"{name}-2"))
            self.num_written += 2
            await asyncio.sleep(0.01)

    async def goes_on(self) -> None:
        seen = self.num_written
        await until(lambda: self.num_written > seen + 60, 30, what="the pools serve on")

    async def stop(self) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)


@pytest.fixture
async def pools(tmp_path: Path, nats_server: NatsServer, nats_buses: BusMaker) -> AsyncIterator[dict[str, PoolClient]]:
    (tmp_path / "shm").mkdir()
    async with AsyncExitStack() as stack:
        clients = {}
        for node in NODES:
            process = KvTierProcess(tmp_path / "pools", nats_server.url, node, shm_dir=str(tmp_path / "shm"))
            stack.callback(process.close)
            clients[node] = PoolClient(await nats_buses(), NodeId(node), WorkerId(f"worker-{node}"))
            stack.push_async_callback(clients[node].close)
        for client in clients.values():
            await client.wait_ready(20)
        yield clients


async def compact(bus: Bus, server: EtcdServer) -> bool:
    """All that was before now is forgotten, on the disk too."""
    page = await call(bus, subjects.registry("snapshot"), Snapshot(limit=1), SnapshotPage, timeout_s=CALL_TIMEOUT_S)
    await asyncio.to_thread(server.compact, page.revision)
    return True


async def test_leader_follower_and_etcd_killed_under_load_leave_no_stale_and_no_lost_placement(
    etcd_server: EtcdServer,
    nats_server: NatsServer,
    nats_buses: BusMaker,
    pools: dict[str, PoolClient],
    tmp_path: Path,
) -> None:
    settings = {
        "nats_url": nats_server.url,
        "registry_etcd_url": etcd_server.url,
        "registry_leader_ttl_s": "2",
        "registry_etcd_timeout_s": "1",
    }
    bus = await nats_buses()
    etcd = Etcd((etcd_server.url.removeprefix("http://"),))
    store = Store(etcd, prefix="/halfmoon", max_txn_ops=1024, write_timeout_s=5.0)
    registries = {name: RegistryProcess(tmp_path, name, **settings) for name in ("registry-1", "registry-2")}

    async def leader() -> str | None:
        return await store.leader(5.0)

    async def other_than(name: str) -> bool:
        return await leader() not in (None, name)

    load = Load(pools)
    try:
        await eventually(leader, 30.0)
        await load.goes_on()

        first = await leader()
        assert first is not None
        registries[first].kill()
        await load.goes_on()
        await eventually(lambda: other_than(first), 30.0, what="the other registry leads")
        await eventually(lambda: compact(bus, etcd_server), 30.0)
        registries[first].start()

        second = await leader()
        assert second is not None
        [follower] = registries.keys() - {second}
        registries[follower].kill()
        await load.goes_on()
        registries[follower].start()

        await asyncio.to_thread(etcd_server.kill)
        await load.goes_on()
        registries[second].kill()
        await asyncio.to_thread(etcd_server.start)
        registries[second].start()
        await eventually(leader, 30.0, what="somebody leads again")
        await load.goes_on()
        await load.stop()

        for node in NODES:
            await eventually(lambda node=node: etcd_agrees(bus, node), 30.0)  # type: ignore[misc]
            assert len((await inventory(bus, node))[0]) >= 6, "its pool is full, as it was all the time"
        assert not [name for name, each in registries.items() if "Traceback" in each.output]
    finally:
        await load.stop()
        for registry in registries.values():
            registry.end(9)
        await etcd.close()
