"""Flushes and pins, from the registry that takes them to pools, etcd, index and SSD: on real NATS and etcd."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog

from halfmoon.bus.endpoint import Envelope, announce, call, serve
from halfmoon.bus.errors import BusError, RemoteError
from halfmoon.bus.nats import NatsBus
from halfmoon.bus.nats_settings import NatsSettings
from halfmoon.bus.protocol import Bus
from halfmoon.bus.streams import CHUNKS
from halfmoon.conductor.indexer import Indexer
from halfmoon.kv_tier.slots import SlotCounts
from halfmoon.pool import PoolClient
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkMeta, ChunkOutcome, Tier
from halfmoon.schemas.ids import ChunkKey, NodeId, RequestId, TenantId, WorkerId
from halfmoon.schemas.kv_tier import ChunksFlushed, FlushChunks, NewChunk, WrittenChunk
from halfmoon.schemas.listing import ChunkList, ListChunks
from halfmoon.schemas.members import MemberState, WorkerHeartbeat
from halfmoon.schemas.orders import FlushOrder, Forget, Forgotten, PinOrder, Selection
from halfmoon.schemas.registry import Flush, Flushed, Pin, PinsChanged, Unpin
from halfmoon.schemas.splits import Role
from halfmoon.schemas.wire import ErrorCode
from support.buses import BusMaker
from support.cut import Proxy
from support.etcd import EtcdServer
from support.heart import Heart
from support.kv_tier_process import KvTierProcess
from support.nats import NatsServer
from support.pool_nodes import CHUNK_BYTES, REQUEST, Node, key_of, running_node, write_chunks
from support.registry import RunningRegistry, etcd_agrees, eventually, inventory
from support.wait import until, until_awaited

pytestmark = [pytest.mark.etcd, pytest.mark.nats]

ACME, OTHER = TenantId("acme"), TenantId("other")
LOG = structlog.stdlib.get_logger("test")


@pytest.fixture
async def bus(nats_buses: BusMaker) -> Bus:
    bus = await nats_buses()
    await bus.ensure_stream(CHUNKS)
    return bus


@pytest.fixture
async def registry(etcd_server: EtcdServer, bus: Bus, tmp_path: Path) -> AsyncIterator[RunningRegistry]:
    async with RunningRegistry(bus, tmp_path, etcd_server.url, "/halfmoon", max_pins=20) as registry:
        await eventually(
            lambda: call(
                bus, subjects.registry("unpin"), Unpin(selection=Selection(tenant=ACME)), PinsChanged, timeout_s=5.0
            )
        )
        yield registry


@asynccontextmanager
async def beating_node(buses: BusMaker, folder: Path, name: str, **settings: object) -> AsyncIterator[Node]:
    """With heartbeats that tell how far it has come; known to the registry from the start."""
    async with running_node(buses, folder, name, settings=settings) as node:

        async def beat() -> None:
            while True:
                heartbeat = node.service.heartbeat()
                await announce(node.bus, subjects.heartbeat(heartbeat.worker), heartbeat)
                await asyncio.sleep(0.1)

        beating = asyncio.create_task(beat())
        try:
            await eventually(lambda: etcd_agrees(node.bus, name))
            yield node
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)


async def flush(bus: Bus, **selection: object) -> Flushed:
    asked = Flush(selection=Selection(**selection))  # type: ignore[arg-type]
    return await call(bus, subjects.registry("flush"), asked, Flushed, timeout_s=10.0)


async def pin(bus: Bus, *names: str) -> PinsChanged:
    asked = Pin(chunks=tuple(PinOrder(key=key_of(name)) for name in names))
    return await call(bus, subjects.registry("pin"), asked, PinsChanged, timeout_s=10.0)


async def names_at(bus: Bus, node: str, names: list[str]) -> set[str]:
    held, _ = await inventory(bus, node)
    return {name for name in names if key_of(name) in held}


def counts(node: Node) -> SlotCounts:
    node.service.store.check_integrity()
    return node.service.store.ledger.slots.counts()


async def is_hit(node: Node, name: str) -> bool:
    acquired = await node.client.acquire(REQUEST, node.wanted(name))
    await node.client.release(acquired.lease_id)
    return acquired.chunks[0].outcome is not ChunkOutcome.MISS


async def test_a_tenant_is_flushed_everywhere_and_its_neighbour_keeps_its_hits(
    nats_buses: BusMaker, bus: Bus, registry: RunningRegistry, tmp_path: Path
) -> None:
    async with (
        beating_node(nats_buses, tmp_path, "a") as a,
        beating_node(nats_buses, tmp_path, "b") as b,
    ):
        for node, chunks in ((a, ("acme-1", "acme-2")), (b, ("acme-2",))):
            await node.client.release(await write_chunks(node.client, *chunks, tenant=ACME))
        await a.client.release(await write_chunks(a.client, "other-1", tenant=OTHER))
        nodes = {NodeId("a"): a.client.info.epoch, NodeId("b"): b.client.info.epoch}
        indexer = Indexer(bus, LOG, live=lambda: nodes, page_timeout_s=5.0)
        following = asyncio.create_task(indexer.run())
        await until(lambda: len(indexer.index) == 3)

        reading = await a.client.acquire(RequestId("reader"), a.wanted("acme-1"))
        slot = reading.chunks[0].slot
        assert slot is not None
        done = await flush(bus, tenant=ACME)

        assert [(each.node, each.error, each.num_leased) for each in done.nodes] == [("a", "", 1), ("b", "", 0)]
        assert [[(tier.tier, tier.num_chunks, tier.num_bytes) for tier in each.tiers] for each in done.nodes] == [
            [(Tier.DRAM, 2, 2 * CHUNK_BYTES)],
            [(Tier.DRAM, 1, CHUNK_BYTES)],
        ]
        assert a.client.holds(slot), "who reads it goes on"
        for name, expected in (("acme-1", False), ("acme-2", False), ("other-1", True)):
            assert await is_hit(a, name) is expected
        assert (counts(a).leased, counts(a).ready) == (1, 1)
        await a.client.release(reading.lease_id)
        assert (counts(a).free, counts(a).ready) == (7, 1)
        await until(lambda: len(indexer.index) == 1)
        assert indexer.index.nodes_of(key_of("other-1")) == {"a"}
        await eventually(lambda: etcd_agrees(bus, "a"))
        await eventually(lambda: etcd_agrees(bus, "b"))
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_what_was_being_written_or_pulled_when_the_flush_came_is_found_by_nobody(
    nats_buses: BusMaker, bus: Bus, registry: RunningRegistry, tmp_path: Path
) -> None:
    async with beating_node(nats_buses, tmp_path, "a") as a:

        async def commit(request: str, created_ns: int, name: str, *, flush_first: bool) -> int:
            new = NewChunk(key=key_of(name), index=0, num_tokens=4, num_bytes=CHUNK_BYTES)
            reserved = await a.client.reserve(RequestId(request), [new])
            slot = reserved.chunks[0].slot
            assert slot is not None
            if flush_first:
                await flush(bus, tenant=ACME)
            meta = ChunkMeta(
                key=key_of(name),
                index=0,
                num_tokens=4,
                num_bytes=CHUNK_BYTES,
                checksum=bytes(16),
                request_id=RequestId(request),
                created_ns=created_ns,
                tenant=ACME,
            )
            chunk = WrittenChunk(slot=slot.slot, generation=slot.generation, meta=meta)
            committed = await a.client.commit(reserved.lease_id, [chunk])
            assert await is_hit(a, name) is bool(committed.num_registered)
            await a.client.release(reserved.lease_id)
            return committed.num_registered

        assert await commit("before", time.time_ns(), "x", flush_first=False) == 1
        assert await commit("meanwhile", time.time_ns() + 10**12, "x", flush_first=True) == 0, "by who was at work"
        assert await commit("late", time.time_ns() - 10**12, "x", flush_first=False) == 0, "computed before"
        assert counts(a).free == 8
        assert await commit("after", time.time_ns(), "x", flush_first=False) == 1


async def test_a_chunk_of_a_node_that_has_not_heard_of_its_flush_is_not_taken_over_from_there(
    nats_buses: BusMaker, bus: Bus, tmp_path: Path
) -> None:
    async with running_node(nats_buses, tmp_path, "a") as a, running_node(nats_buses, tmp_path, "b") as b:
        await a.client.release(await write_chunks(a.client, "acme-1", tenant=ACME))
        await a.client.release(await write_chunks(a.client, "other-1", tenant=OTHER))
        order = FlushOrder(seq=0, before_ns=time.time_ns(), selection=Selection(tenant=ACME))
        told = FlushChunks(order=order)
        done = await call(bus, "halfmoon.kvtier.b.flush", told, ChunksFlushed, timeout_s=5.0)
        assert done == ChunksFlushed(tiers=())
        for keep in (False, True):
            pulled = await b.client.acquire(REQUEST, b.wanted("acme-1", "other-1", sources=[a.source]), keep=keep)
            assert [chunk.outcome for chunk in pulled.chunks] == [ChunkOutcome.MISS, ChunkOutcome.HIT_REMOTE]
            assert "flushed" in pulled.chunks[0].detail
            await b.client.release(pulled.lease_id)
        await until(lambda: counts(b).free == 7)
        assert counts(b).ready == 1


async def test_a_node_that_was_cut_off_hands_out_nothing_flushed_when_the_broker_is_back(
    nats_server: NatsServer, nats_buses: BusMaker, bus: Bus, registry: RunningRegistry, tmp_path: Path
) -> None:
    """Nobody reminds it: that it was cut off is all that it knows."""
    assert nats_server.port is not None
    async with Proxy("127.0.0.2", "127.0.0.1", nats_server.port) as network:
        connection = NatsSettings(url=f"nats://127.0.0.2:{nats_server.port}", reconnect_max_s=0.1)

        async def behind_the_network() -> Bus:
            return await NatsBus.connect(connection)

        async with running_node(behind_the_network, tmp_path, "a") as a:
            await a.client.release(await write_chunks(a.client, "acme-1", tenant=ACME))
            await a.client.release(await write_chunks(a.client, "other-1", tenant=OTHER))
            reader = PoolClient(bus, NodeId("a"), WorkerId("reader"))
            await reader.describe()
            await network.shut()
            await until(lambda: not a.bus.is_connected)
            await flush(bus, tenant=ACME)
            asking = [asyncio.create_task(_outcome(reader, a, name)) for name in ("acme-1", "other-1")]
            await network.open()
            assert await asyncio.gather(*asking) == [ChunkOutcome.MISS, ChunkOutcome.HIT_LOCAL]
            await reader.close()


async def _outcome(client: PoolClient, node: Node, name: str) -> ChunkOutcome:
    """As soon as the node answers."""
    while True:
        with contextlib.suppress(BusError):
            acquired = await client.acquire(REQUEST, node.wanted(name))
            await client.release(acquired.lease_id)
            return acquired.chunks[0].outcome
        await asyncio.sleep(0.001)


async def test_a_node_that_was_killed_serves_nothing_flushed_when_it_is_back_its_ssd_included(
    nats_server: NatsServer, nats_buses: BusMaker, bus: Bus, registry: RunningRegistry, tmp_path: Path
) -> None:
    ssd: dict[str, object] = {
        "ssd_dir": tmp_path / "ssd",
        "ssd_bytes": 1 << 20,
        "high_watermark": 0.3,
        "low_watermark": 0.1,
        "ssd_admission": "all",
    }
    acme, other = [f"acme-{number}" for number in range(3)], [f"other-{number}" for number in range(3)]
    shm: dict[str, object] = {"shm_dir": tmp_path}
    settings = {name: str(value) for name, value in (ssd | shm).items()}
    process = KvTierProcess(tmp_path / "data", nats_server.url, "a", **settings)
    client = PoolClient(await nats_buses(), NodeId("a"), WorkerId("writer"))
    try:
        await client.wait_ready(30.0)
        await client.release(await write_chunks(client, *acme, tenant=ACME))
        await client.release(await write_chunks(client, *other, tenant=OTHER))

        async def num_on_ssd() -> int:
            stats = await client.stats()
            return 0 if stats.ssd is None else stats.ssd.num_chunks

        await until_awaited(lambda: _is_at_least(num_on_ssd(), 5))
        found = await call(bus, "halfmoon.kvtier.a.list", ListChunks(tier=Tier.SSD), ChunkList, timeout_s=5.0)
        on_ssd = {each.meta.key for each in found.chunks}
        await eventually(lambda: etcd_agrees(bus, "a"))
        process.signal(signal.SIGKILL)
        process.wait()
    finally:
        process.close()
        await client.close()
    async with beating_node(nats_buses, tmp_path, "b") as b:
        done = await flush(bus, tenant=ACME)
        assert [(each.node, bool(each.error)) for each in done.nodes] == [("a", True), ("b", False)]
        await b.client.release(await write_chunks(b.client, "acme-9", tenant=ACME))
        async with beating_node(nats_buses, tmp_path, "a", **ssd) as a:
            await until(lambda: a.service.store.lower is not None)
            held, _ = await inventory(bus, "a")
            others = {key_of(name) for name in other}
            assert on_ssd & others <= held <= others
            assert held
            assert not await is_hit(a, acme[0])
            found = await call(bus, "halfmoon.kvtier.a.list", ListChunks(tier=Tier.SSD), ChunkList, timeout_s=5.0)
            assert {each.meta.tenant for each in found.chunks} == {OTHER}
            await eventually(lambda: etcd_agrees(bus, "a"))
            assert await names_at(bus, "b", ["acme-9"]) == {"acme-9"}, "what was computed since"


async def test_a_node_that_missed_orders_is_told_them_as_soon_as_it_is_heard_again(
    nats_buses: BusMaker, bus: Bus, registry: RunningRegistry, tmp_path: Path
) -> None:
    async with beating_node(nats_buses, tmp_path, "a") as a:
        await a.client.release(await write_chunks(a.client, "x", "y", tenant=ACME))
        flushes, pins = (a.service._verbs.endpoints.pop(verb) for verb in ("flush", "pin"))
        for endpoint in (flushes, pins):
            await endpoint.unsubscribe()
        done = await flush(bus, keys=(key_of("x"),))
        assert done.nodes[0].error
        assert (await pin(bus, "y")).nodes[0].error
        await eventually(lambda: _pinned(a, 1), what="made up for")
        assert await names_at(bus, "a", ["x", "y"]) == {"y"}


async def _is_at_least(number: Awaitable[int], least: int) -> bool:
    return await number >= least


async def _pinned(node: Node, number: int) -> bool:
    return counts(node).pinned == number


async def test_pins_hold_are_bounded_survive_a_restart_and_end_with_a_flush(
    nats_buses: BusMaker, bus: Bus, registry: RunningRegistry, tmp_path: Path
) -> None:
    names = [f"chunk-{number}" for number in range(8)]
    async with beating_node(nats_buses, tmp_path, "a") as a:
        await a.client.release(await write_chunks(a.client, *names[:6]))
        done = await pin(bus, *names[:5], "absent")
        assert [(each.num_pinned, each.num_refused, each.num_absent, each.max_slots) for each in done.nodes] == [
            (4, 1, 1, 4)
        ]
        assert (done.num_changed, done.num_pins) == (6, 6)
        assert (counts(a).pinned, counts(a).ready) == (4, 2)
        held = await a.client.acquire(REQUEST, a.wanted(*names[:2]))
        assert (counts(a).pinned, counts(a).leased) == (4, 0), "counted once"
        await a.client.release(held.lease_id)
        for name in ("flood-1", "flood-2", "flood-3", "flood-4", "flood-5"):
            await a.client.release(await write_chunks(a.client, name))
        assert await names_at(bus, "a", names[:4]) == set(names[:4]), "they outlive any flood"
        with pytest.raises(RemoteError) as refused:
            await pin(bus, *(f"many-{number}" for number in range(30)))
        assert refused.value.error.code is ErrorCode.NO_SPACE
        ended = await call(
            bus,
            subjects.registry("unpin"),
            Unpin(selection=Selection(keys=(key_of(names[0]),))),
            PinsChanged,
            timeout_s=5.0,
        )
        assert (ended.num_changed, ended.num_pins) == (1, 5)
        heartbeat = a.service.heartbeat()
        assert heartbeat.pool is not None
        assert heartbeat.orders_seq == ended.seq
        assert heartbeat.pool.pinned == counts(a).pinned
    async with beating_node(nats_buses, tmp_path, "a") as a:
        await until(lambda: a.service.heartbeat().orders_seq == ended.seq)
        await a.client.release(await write_chunks(a.client, *names[:4]))
        assert counts(a).pinned == 3, "all but the one that was unpinned"
        done_flush = await flush(bus, everything=True)
        assert done_flush.num_unpinned == 5
        assert (counts(a).free, counts(a).pinned) == (8, 0)
        await a.client.release(await write_chunks(a.client, names[1]))
        assert counts(a).pinned == 0


async def test_a_worker_forgets_what_its_engine_caches_and_one_that_missed_it_is_told_again(
    bus: Bus, registry: RunningRegistry
) -> None:
    heard: list[int] = []

    async def forget(message: Forget, envelope: Envelope) -> Forgotten:
        heard.append(message.order.seq)
        return Forgotten(worker=WorkerId("decode-1"), num_chunks=7)

    heart = Heart(
        bus,
        WorkerHeartbeat(
            worker=WorkerId("decode-1"),
            role=Role.DECODE,
            node=NodeId("a"),
            started_ns=time.time_ns(),
            state=MemberState.SERVING,
        ),
    )
    async with contextlib.AsyncExitStack() as undo:
        undo.push_async_callback(heart.stop)

        async def is_known() -> bool:
            return [each.worker for each in (await flush(bus, tenant=ACME)).workers] == ["decode-1"]

        await eventually(is_known)
        done = await flush(bus, model="nobody's")
        assert [bool(each.error) for each in done.workers] == [True], "nobody serves its subject yet"
        endpoint = await serve(bus, subjects.forget(WorkerId("decode-1")), Forget, forget)
        undo.push_async_callback(endpoint.unsubscribe)
        await until(lambda: heard == [done.seq])
        done = await flush(bus, everything=True)
        assert [(each.worker, each.num_chunks, each.error) for each in done.workers] == [("decode-1", 7, "")]


async def test_flushes_that_can_not_be_meant_are_refused(bus: Bus, registry: RunningRegistry) -> None:
    for selection, words in (
        (Selection(), "nothing is selected"),
        (Selection(keys=(ChunkKey(b"short"),)), "32 bytes"),
        (Selection(prefixes=(ChunkKey(bytes(32)),) * 5000), "at most 4096"),
    ):
        with pytest.raises(RemoteError, match=words):
            await call(bus, subjects.registry("flush"), Flush(selection=selection), Flushed, timeout_s=5.0)
