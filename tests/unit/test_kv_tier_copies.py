"""Copies that nobody asked for: they come when no request waits, are linked to their makers, counted, and go first."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import structlog
from opentelemetry.sdk.trace import ReadableSpan

from halfmoon.bus.endpoint import Envelope, announce, call, serve
from halfmoon.bus.errors import RemoteError
from halfmoon.bus.memory import MemoryBroker, MemoryBus
from halfmoon.bus.protocol import BusMessage
from halfmoon.kv_tier.trim import Trimmer
from halfmoon.kv_tier.unasked import Unasked
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkEvicted, ChunkOutcome, EvictReason
from halfmoon.schemas.copies import AskSurplus, Cause, Replicate, Replicating, Surplus
from halfmoon.schemas.ids import ChunkKey, NodeId, WorkerId
from halfmoon.schemas.kv_tier import ChunkSource, WantedChunk
from halfmoon.schemas.registry import MemberEvent, MemberLost, Orders, StandingOrders
from halfmoon.tracing import attributes, names
from support.pool_nodes import REQUEST, Node, content_of, key_of, running_node, wanted_of
from support.wait import until

NAMES = [f"chunk-{number}" for number in range(8)]


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def nodes(broker: MemoryBroker, tmp_path: Path) -> AsyncIterator[tuple[Node, Node]]:
    """Of eight slots each; half of one may hold what nobody asked for."""
    async with AsyncExitStack() as stack:
        settings = {"copy_share": 0.5, "trim_every_s": 3600.0, "trim_free_share": 1.0}
        yield (
            await stack.enter_async_context(running_node(broker, tmp_path, "node-a", settings=settings)),
            await stack.enter_async_context(running_node(broker, tmp_path, "node-b", settings=settings)),
        )


async def order(to: Node, chunks: list[WantedChunk], cause: Cause = Cause.DEMAND) -> Replicating:
    subject = f"{subjects.kv_tier(to.service.node)}.replicate"
    return await call(to.bus, subject, Replicate(chunks=tuple(chunks), cause=cause), Replicating, timeout_s=5)


def fates(node: Node, cause: Cause) -> tuple[float, float, float]:
    """Brought, hit, waste."""
    value, prefix = node.metrics.registry.get_sample_value, "halfmoon_kvtier_copied_chunks"
    hit, waste = (value(f"{prefix}_ended_total", {"cause": cause, "fate": fate}) for fate in ("hit", "waste"))
    return value(f"{prefix}_total", {"cause": cause}) or 0.0, hit or 0.0, waste or 0.0


def named(node: Node, name: str) -> list[ReadableSpan]:
    """Spans of this name, as far as they are exported."""
    return [span for span in node.spans.get_finished_spans() if span.name == name]


async def test_a_copy_has_the_same_bytes_and_its_transfer_links_to_its_maker(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    with a.service._runtime.telemetry.tracer.span("a request") as made:
        await a.client.release(await a.write(*NAMES[:3]))
    assert await order(b, b.wanted(*NAMES[:3], sources=[a.source])) == Replicating(num_here=0, num_queued=3)
    await until(lambda: fates(b, Cause.DEMAND) == (3, 0, 0))
    assert await order(b, b.wanted(*NAMES[:3], sources=[a.source])) == Replicating(num_here=3, num_queued=0)
    assert (await a.client.stats()).hits_local == 0, "a copy is nobody's use"
    acquired = await b.client.acquire(REQUEST, wanted_of(*NAMES[:2]))
    for name, chunk in zip(NAMES, acquired.chunks, strict=False):
        assert (chunk.outcome, chunk.slot is not None) == (ChunkOutcome.HIT_LOCAL, True)
        assert chunk.slot is not None
        assert bytes(b.client.payload(chunk.slot)) == content_of(name)
    assert fates(b, Cause.DEMAND) == (3, 2, 0)
    await b.client.release(acquired.lease_id)
    await until(lambda: named(b, names.KVTIER_REPLICATE))
    (batch,) = named(b, names.KVTIER_REPLICATE)
    assert batch.attributes is not None
    assert batch.attributes["halfmoon.replicate.cause"] == "demand"
    transfers = named(b, names.KVTIER_TRANSFER)
    assert len(transfers) == 3
    for span in transfers:
        assert span.parent is not None
        assert span.parent.span_id == batch.context.span_id
        assert [link.context.trace_id for link in span.links] == [made.get_span_context().trace_id]
        assert span.attributes is not None
        assert span.attributes[attributes.REQUEST_ID] == REQUEST


async def test_no_more_than_their_share_and_unused_ones_are_waste_when_they_go(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    await a.client.release(await a.write(*NAMES))
    answer = await order(b, b.wanted(*NAMES, sources=[a.source]), Cause.PREFETCH)
    assert answer == Replicating(num_here=0, num_queued=4), "half of eight slots"
    await until(lambda: fates(b, Cause.PREFETCH) == (4, 0, 0))
    assert await order(b, b.wanted(*NAMES[4:], sources=[a.source])) == Replicating(num_here=0, num_queued=0)
    await b.client.release(await b.write(*(f"other-{number}" for number in range(8))))
    await until(lambda: fates(b, Cause.PREFETCH) == (4, 0, 4))


async def test_while_requests_wait_for_pulls_copies_do_too_and_are_given_up(
    broker: MemoryBroker, tmp_path: Path
) -> None:
    settings = {"copy_give_up_s": 0.2, "acquire_timeout_s": 1.0, "max_transfers": 1}
    async with (
        running_node(broker, tmp_path, "node-a") as a,
        running_node(broker, tmp_path, "node-b", settings=settings) as b,
    ):
        await a.client.release(await a.write("a", "b"))

        async def says_nothing(message: BusMessage) -> None:
            return None

        silent = ChunkSource(node=NodeId("silent"), epoch=1)
        await a.bus.subscribe(f"{subjects.kv_tier(silent.node)}.describe", says_nothing)
        waiting = asyncio.create_task(b.client.acquire(REQUEST, wanted_of("x", sources=[silent])))
        await until(lambda: b.service.heartbeat().queued_transfers == 1)
        assert (await order(b, b.wanted("a", sources=[a.source]))).num_queued == 1
        value = b.metrics.registry.get_sample_value
        await until(lambda: value("halfmoon_kvtier_copies_left_out_total", {"reason": "given_up"}) == 1)
        assert fates(b, Cause.DEMAND) == (0, 0, 0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_orders_that_make_no_sense_are_refused(nodes: tuple[Node, Node]) -> None:
    _, b = nodes
    chunk = WantedChunk(key=ChunkKey(b"short"), index=0, num_tokens=1, num_bytes=1)
    with pytest.raises(RemoteError, match="32 bytes"):
        await order(b, [chunk])
    assert await order(b, b.wanted("nowhere")) == Replicating(num_here=0, num_queued=1)
    value = b.metrics.registry.get_sample_value
    await until(lambda: value("halfmoon_kvtier_copies_left_out_total", {"reason": "failed"}) == 1)


async def trimming(node: Node, bus: MemoryBus, *surplus: str) -> Trimmer:
    """A look of the node's, answered as any conductor would."""
    asked: list[AskSurplus] = []

    async def answer(request: AskSurplus, envelope: Envelope) -> Surplus:
        asked.append(request)
        return Surplus(keys=tuple(key_of(name) for name in surplus if key_of(name) in request.keys))

    endpoint = await serve(bus, subjects.SURPLUS, AskSurplus, answer)
    trimmer = Trimmer(
        node.service.store, node.bus, structlog.stdlib.get_logger("test"), node=node.service.node, free_share=1.0
    )
    await trimmer.open()
    await trimmer.look()
    assert [request.node for request in asked] == [node.service.node]
    await endpoint.unsubscribe()
    return trimmer


def held_by(node: Node) -> set[str]:
    return {name for name in NAMES if node.service.store.ledger.slots.find(key_of(name)) is not None}


async def test_what_others_hold_goes_first_however_much_it_is_worth(
    nodes: tuple[Node, Node], broker: MemoryBroker
) -> None:
    a, _ = nodes
    await a.client.release(await a.write(*NAMES))
    trimmer = await trimming(a, MemoryBus(broker), *NAMES[:4])
    await a.client.release((await a.client.acquire(REQUEST, wanted_of(NAMES[3]))).lease_id)
    await a.client.release(await a.write("x", "y"))
    assert held_by(a) >= set(NAMES[3:]), "what is used is no more surplus"
    assert len(held_by(a)) == 6
    assert a.metrics.registry.get_sample_value("halfmoon_kvtier_trimmed_total") == 2
    await until(lambda: len(named(a, names.KVTIER_EVICT)) == 2)
    evictions = named(a, names.KVTIER_EVICT)
    assert [span.attributes and span.attributes["halfmoon.evict.is_surplus"] for span in evictions] == [True, True]
    await trimmer.close()


@pytest.mark.parametrize("who", ["evicted", "lost", "nobody"])
async def test_what_another_lets_go_is_surplus_no_more(
    nodes: tuple[Node, Node], broker: MemoryBroker, who: str
) -> None:
    a, b = nodes
    await a.client.release(await a.write(*NAMES))
    trimmer = await trimming(a, MemoryBus(broker), *NAMES[:2])
    evictor = a.service.store.evictor
    assert evictor.num_surplus == 2
    if who == "evicted":
        gone = ChunkEvicted(node=NodeId("node-b"), epoch=1, keys=(key_of(NAMES[0]),), reason=EvictReason.CAPACITY)
        await announce(b.bus, subjects.evict(NodeId("node-b")), gone)
        await until(lambda: evictor.num_surplus == 1)
        assert evictor.is_surplus(key_of(NAMES[1]))
    elif who == "lost":
        lost: MemberEvent = MemberLost(worker=WorkerId("w"), node=NodeId("node-b"))
        await announce(b.bus, subjects.member(lost.worker), lost)
        await until(lambda: evictor.num_surplus == 0)
    else:
        await trimmer.look()
        assert evictor.num_surplus == 0, "no conductor answers any more"
    await trimmer.close()


def test_what_was_brought_is_used_or_wasted_once() -> None:
    unasked = Unasked()
    first, second = key_of("1"), key_of("2")
    for key in (first, second, first):
        unasked.bring(key, Cause.PINNED)
    unasked.used([first, first])
    unasked.gone(first)
    assert (unasked.num_waiting(Cause.PINNED), len(unasked)) == (1, 1)
    unasked.gone(second)
    assert (unasked.brought, unasked.hits, unasked.waste) == ({"pinned": 2}, {"pinned": 1}, {"pinned": 1})


async def no_orders(broker: MemoryBroker) -> None:
    """A registry by which nothing was pinned or flushed: an SSD's content is used only once that is known."""

    async def answer(request: Orders, envelope: Envelope) -> StandingOrders:
        return StandingOrders(seq=0, flushes=(), pins=())

    await serve(MemoryBus(broker), subjects.registry("orders"), Orders, answer)


async def test_what_lies_on_the_nodes_own_ssd_is_brought_up_to_dram(broker: MemoryBroker, tmp_path: Path) -> None:
    settings = {
        "ssd_dir": tmp_path / "ssd",
        "ssd_bytes": 1 << 20,
        "ssd_admission": "all",
        "high_watermark": 0.75,
        "low_watermark": 0.5,
        "copy_share": 1.0,
    }
    await no_orders(broker)
    async with running_node(broker, tmp_path, "node-a", settings=settings) as node:
        await node.client.release(await node.write(*NAMES))
        store = node.service.store
        await until(lambda: store.ledger.slots.counts().free >= 4, what="half of it is on the SSD")
        below = [name for name in NAMES if store.ledger.slots.find(key_of(name)) is None]
        assert len(below) >= 4
        assert (await order(node, node.wanted(below[0]), Cause.PREFETCH)).num_queued == 1
        await until(lambda: fates(node, Cause.PREFETCH) == (1, 0, 0))
        acquired = await node.client.acquire(REQUEST, wanted_of(below[0]))
        (chunk,) = acquired.chunks
        assert chunk.outcome is ChunkOutcome.HIT_LOCAL
        assert chunk.slot is not None
        assert bytes(node.client.payload(chunk.slot)) == content_of(below[0])
        assert fates(node, Cause.PREFETCH) == (1, 1, 0)
        await node.client.release(acquired.lease_id)
        store.check_integrity()


async def test_surplus_chunks_leave_dram_without_a_write_to_the_ssd(broker: MemoryBroker, tmp_path: Path) -> None:
    settings = {
        "ssd_dir": tmp_path / "ssd",
        "ssd_bytes": 1 << 20,
        "ssd_admission": "all",
        "high_watermark": 0.9,
        "low_watermark": 0.75,
        "trim_every_s": 3600.0,
    }
    await no_orders(broker)
    async with running_node(broker, tmp_path, "node-a", settings=settings) as node:
        await node.client.release(await node.write(*NAMES[:7]))
        trimmer = await trimming(node, MemoryBus(broker), *NAMES[:7])
        await node.client.release(await node.write(NAMES[7]))
        store = node.service.store
        await until(lambda: store.ledger.slots.counts().free >= 2)
        assert store.lower is not None
        assert store.lower.ssd.counters.writes == 0
        assert store.counters.trimmed == 2
        await trimmer.close()
