"""What etcd and the conductors believe of a node, against the node's own inventory: after a loss, a lie, and deaths."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from halfmoon.bus.endpoint import call, read_stream
from halfmoon.bus.errors import RemoteError, StreamGap
from halfmoon.bus.memory import MemoryBroker, MemoryBus
from halfmoon.bus.protocol import Bus
from halfmoon.bus.streams import CHUNKS
from halfmoon.scheduling.index import ChunkIndex
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkEvent, ChunkRegistered, Tier
from halfmoon.schemas.ids import ChunkKey, NodeId, WorkerId
from halfmoon.schemas.kv_tier import Done, Retell
from halfmoon.schemas.registry import Snapshot, SnapshotPage
from halfmoon.schemas.wire import ErrorCode
from support.etcd import EtcdServer
from support.heart import Heart
from support.pool_nodes import Node, key_of, running_node
from support.registry import (
    CALL_TIMEOUT_S,
    RunningRegistry,
    applied,
    etcd_agrees,
    eventually,
    evicted,
    inventory,
    pool_beat,
    publish,
    registered,
    snapshot,
)

pytestmark = pytest.mark.etcd

NAMES = [f"chunk-{number}" for number in range(6)]


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def bus(broker: MemoryBroker) -> AsyncIterator[Bus]:
    bus = MemoryBus(broker)
    await bus.ensure_stream(CHUNKS)
    yield bus
    await bus.close()


def beat(node: Node) -> Heart:
    return Heart(node.bus, pool_beat(f"kv-{node.service.node}", node.service.node, node.client.info.epoch))


async def told(bus: Bus, node: str) -> bool:
    return (await inventory(bus, node))[1] == 0


async def test_an_inventory_is_paged_and_says_what_is_registered(
    broker: MemoryBroker, bus: Bus, tmp_path: Path
) -> None:
    async with running_node(broker, tmp_path, "a") as node:
        lease = await node.write(*NAMES)
        await node.client.release(lease)
        handed = await node.write("handed-over", register=False)
        for limit in (1, 2, 4096):
            held, _ = await inventory(bus, "a", limit)
            assert held == {key_of(name) for name in NAMES}
        with pytest.raises(RemoteError) as caught:
            await inventory(bus, "a", 0)
        assert caught.value.error.code is ErrorCode.INVALID_REQUEST
        with pytest.raises(RemoteError, match="keys of 32 bytes"):
            await call(bus, "halfmoon.kvtier.a.retell", Retell(keys=(ChunkKey(b"short"),)), Done, timeout_s=5.0)
        await node.client.release(handed)


async def test_a_node_forgotten_for_long_silence_is_known_again_when_it_returns_in_the_same_epoch(
    etcd_server: EtcdServer, broker: MemoryBroker, bus: Bus, tmp_path: Path
) -> None:
    async with (
        running_node(broker, tmp_path, "a") as node,
        RunningRegistry(bus, tmp_path, etcd_server.url, "/halfmoon", forget_node_after_s=0.1),
    ):
        heart = beat(node)
        await node.client.release(await node.write(*NAMES))
        await eventually(lambda: etcd_agrees(bus, "a"))
        await heart.stop()

        async def forgotten() -> bool:
            placements, _, epochs = await snapshot(bus)
            return not placements and "a" not in epochs

        await eventually(forgotten, what="the node is forgotten")
        heart = beat(node)
        await eventually(lambda: etcd_agrees(bus, "a"), what="its chunks are known again")
        placements, _, epochs = await snapshot(bus)
        assert {each.chunk.key for each in placements} == {key_of(name) for name in NAMES}
        assert epochs == {NodeId("a"): node.client.info.epoch}
        await heart.stop()


async def test_what_the_stream_left_out_or_said_wrongly_is_set_right_also_for_those_who_follow_it(
    etcd_server: EtcdServer, broker: MemoryBroker, bus: Bus, tmp_path: Path
) -> None:
    index = ChunkIndex()

    async def follow(_: int, event: ChunkEvent) -> None:
        index.apply(event)

    async def no_gap(gap: StreamGap) -> None:
        raise gap

    follower = await read_stream(bus, subjects.CHUNKS_STREAM, ChunkEvent, follow, start_seq=1, on_gap=no_gap)
    async with running_node(broker, tmp_path, "a") as node:
        epoch = node.client.info.epoch
        await node.client.release(await node.write(*NAMES))
        await eventually(lambda: told(bus, "a"))
        # As after a gap: something is thought to be there that isn't, something isn't that is, one is on no SSD.
        chunk = node.service.store.meta_of(key_of(NAMES[1]))
        assert chunk is not None
        on_ssd = msgspec.structs.replace(chunk, tier=Tier.SSD)
        await publish(bus, ChunkRegistered(node=NodeId("a"), epoch=epoch, chunks=(on_ssd,)))
        wrong = evicted("a", epoch, 1)
        await publish(bus, type(wrong)(node=wrong.node, epoch=epoch, keys=(key_of(NAMES[0]),), reason=wrong.reason))
        seq = await publish(bus, registered("a", epoch, 1))
        async with RunningRegistry(bus, tmp_path, etcd_server.url, "/halfmoon") as registry:
            await applied(bus, seq)
            assert registry.service.leader is not None
            heart = beat(node)
            await eventually(lambda: etcd_agrees(bus, "a"))
            held, _ = await inventory(bus, "a")
            assert held == {key_of(name) for name in NAMES}

            async def tier_is_right() -> bool:
                (placements, _, _) = await snapshot(bus)
                return {each.chunk.tier for each in placements} == {Tier.DRAM}

            await eventually(tier_is_right)

            async def index_agrees() -> bool:
                on_ssd = index.match((key_of(NAMES[1]),), {NodeId("a"): epoch}).on_ssd
                return len(index) == len(held) and not any(on_ssd) and all(index.nodes_of(key) == {"a"} for key in held)

            await eventually(index_agrees)
            await heart.stop()
    await follower.unsubscribe()


async def test_etcd_killed_and_registries_replaced_under_load_leave_no_stale_and_no_lost_placement(
    etcd_server: EtcdServer, broker: MemoryBroker, bus: Bus, tmp_path: Path
) -> None:
    async with running_node(broker, tmp_path, "a") as a, running_node(broker, tmp_path, "b", host="host-2") as b:
        hearts = [beat(a), beat(b)]
        stopped = asyncio.Event()
        written = 0

        async def load(node: Node) -> None:
            """Eight slots: every chunk written evicts another."""
            nonlocal written
            while not stopped.is_set():
                name = secrets.token_hex(8)
                await node.client.release(await node.write(name, f"{name}-2"))
                written += 2
                await asyncio.sleep(0.002)

        loads = [asyncio.create_task(load(node)) for node in (a, b)]

        async def goes_on(until: int) -> bool:
            return written > until

        try:
            for number in range(2):
                async with RunningRegistry(
                    bus, tmp_path, etcd_server.url, "/halfmoon", name=f"registry-{number}", leader_ttl_s=2
                ) as registry:

                    async def leads(registry: RunningRegistry = registry) -> bool:
                        return registry.leads

                    await eventually(leads)
                    seen = written
                    await eventually(lambda seen=seen: goes_on(seen + 20))  # type: ignore[misc]
                    await asyncio.to_thread(etcd_server.kill)
                    seen = written
                    await eventually(lambda seen=seen: goes_on(seen + 20))  # type: ignore[misc]
                    await asyncio.to_thread(etcd_server.start)
        finally:
            stopped.set()
            await asyncio.gather(*loads)
        async with RunningRegistry(bus, tmp_path, etcd_server.url, "/halfmoon", name="registry-last", leader_ttl_s=2):
            for node in ("a", "b"):
                await eventually(lambda node=node: etcd_agrees(bus, node))  # type: ignore[misc]
                assert (await inventory(bus, node))[0]
        for heart in hearts:
            await heart.stop()


async def test_a_compaction_ends_a_snapshot_that_is_being_read_and_nothing_else(
    etcd_server: EtcdServer, bus: Bus, tmp_path: Path
) -> None:
    async with RunningRegistry(bus, tmp_path, etcd_server.url, "/halfmoon", leader_ttl_s=2) as registry:
        heart = Heart(bus, pool_beat("kv-a", "a", 1))
        await applied(bus, await publish(bus, registered("a", 1, *range(10))))
        subject = subjects.registry("snapshot")
        first = await call(bus, subject, Snapshot(limit=4), SnapshotPage, timeout_s=CALL_TIMEOUT_S)
        await applied(bus, await publish(bus, registered("a", 1, *range(10, 20))))
        newest = await call(bus, subject, Snapshot(limit=1), SnapshotPage, timeout_s=CALL_TIMEOUT_S)
        assert newest.revision > first.revision
        await asyncio.to_thread(etcd_server.compact, newest.revision)
        ask = Snapshot(cursor=first.cursor, revision=first.revision, limit=4)
        with pytest.raises(RemoteError, match="start again from the first page") as caught:
            await call(bus, subject, ask, SnapshotPage, timeout_s=CALL_TIMEOUT_S)
        assert caught.value.error.code is ErrorCode.STALE
        placements, _, _ = await snapshot(bus, limit=4)
        assert len(placements) == 20
        await applied(bus, await publish(bus, evicted("a", 1, *range(5))))
        assert len((await snapshot(bus))[0]) == 15
        assert registry.leads
        assert WorkerId("registry-1") == registry.worker
        await heart.stop()
