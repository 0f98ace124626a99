"""Conductors and pools about copies: who decides, what is ordered, and that of two copies one always stays."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import structlog

from halfmoon.bus.endpoint import Envelope, call, read_stream, serve
from halfmoon.bus.errors import RemoteError, StreamGap
from halfmoon.bus.memory import MemoryBroker, MemoryBus
from halfmoon.bus.protocol import Bus
from halfmoon.conductor.copies import MAX_ASKED, Copies
from halfmoon.conductor.instruments import Instruments
from halfmoon.conductor.members import Members
from halfmoon.kv_tier.trim import Trimmer
from halfmoon.scheduling.cluster import WorkerLoad
from halfmoon.scheduling.contract import DecodeChoice, Plan, PrefillChoice, Replication
from halfmoon.scheduling.copies import CopyLimits
from halfmoon.scheduling.demand import Demand
from halfmoon.scheduling.index import ChunkIndex
from halfmoon.scheduling.replication import ReplicaPlanner, Run
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkEvent, ChunkMeta, ChunkRegistered, NodeCleared, Tier
from halfmoon.schemas.copies import AskSurplus, Cause, Replicate, Replicating, Surplus
from halfmoon.schemas.ids import ChunkKey, NodeId, RequestId, WorkerId
from halfmoon.schemas.members import MemberState, NodeHeartbeat, ServiceHeartbeat
from halfmoon.schemas.pool_stats import PoolStats
from halfmoon.schemas.splits import Role
from halfmoon.tracing.metrics import Metrics
from support.conductors import CARD
from support.pool_nodes import Node, key_of, running_node, write_chunks
from support.wait import until

NAMES = [f"chunk-{number}" for number in range(4)]
KEYS = tuple(key_of(name) for name in NAMES)
A, B, C = NodeId("node-a"), NodeId("node-b"), NodeId("node-c")
LOG = structlog.stdlib.get_logger("test")


class Deciding:
    """One conductor's part in copies, and what it knows."""

    def __init__(
        self, bus: Bus, name: str = "conductor-1", confidence: float = 1.0, pinned: Sequence[Run] = ()
    ) -> None:
        self.bus = bus
        self.members = Members()
        self.index: ChunkIndex | None = ChunkIndex()
        self.metrics = Metrics()
        self.planner = ReplicaPlanner(CopyLimits(max_copies=2, uses_per_copy=4.0), Demand(60.0), 1e9)
        self.copies = Copies(
            bus,
            WorkerId(name),
            self.members,
            lambda: self.index,
            self.planner,
            Instruments(self.metrics),
            LOG,
            prefetch_confidence=confidence,
            pinned=lambda: pinned,
        )

    def hear_node(self, node: NodeId, epoch: int, *, labels: dict[str, str] | None = None) -> None:
        stats = PoolStats(total=100, free=100, staged=0, ready=0, leased=0, num_leases=0, num_chunks=0)
        beat = NodeHeartbeat(
            worker=WorkerId(f"kv-{node}"),
            node=node,
            epoch=epoch,
            started_ns=1,
            state=MemberState.SERVING,
            host=node,
            pool=stats,
            labels=labels or {},
        )
        self.members.hear(beat, 0.0)

    def hear_conductors(self, *names: str) -> None:
        for name in names:
            beat = ServiceHeartbeat(worker=WorkerId(name), service="conductor", started_ns=1, state=MemberState.SERVING)
            self.members.hear(beat, 0.0)

    async def follow(self) -> None:
        """The stream of chunk events, from its beginning."""

        async def apply(seq: int, event: ChunkEvent) -> None:
            if self.index is not None:
                self.index.apply(event)

        async def gap(error: StreamGap) -> None:
            raise AssertionError(error)

        await read_stream(self.bus, subjects.CHUNKS_STREAM, ChunkEvent, apply, start_seq=1, on_gap=gap)

    async def open(self) -> None:
        service = await self.bus.add_service("halfmoon-conductor", "1.0.0", "test")
        await self.copies.open(service)

    def place(self, keys: Sequence[ChunkKey], node: NodeId = A, replication: Replication | None = None) -> None:
        assert self.index is not None
        match = self.index.match(keys, self.members.cluster().nodes)
        self.copies.placed(keys, match, plan_at(node, replication))

    def ordered(self, cause: Cause, answer: str) -> float:
        labels = {"cause": cause.value, "answer": answer}
        return self.metrics.registry.get_sample_value("halfmoon_conductor_copies_ordered_total", labels) or 0.0


def plan_at(node: NodeId, replication: Replication | None = None) -> Plan:
    prefill = WorkerLoad(worker=WorkerId("p"), role=Role.PREFILL, node=node, card=CARD)
    decode = WorkerLoad(worker=WorkerId("d"), role=Role.DECODE, node=node, card=CARD)
    return Plan(
        CARD, (PrefillChoice(worker=prefill, num_reused=0),), (DecodeChoice(worker=decode),), "test", replication
    )


class Listener:
    """A pool that only takes orders."""

    def __init__(self) -> None:
        self.orders: list[Replicate] = []

    async def listen(self, bus: Bus, node: NodeId) -> None:
        await serve(bus, f"{subjects.kv_tier(node)}.replicate", Replicate, self._take)

    async def _take(self, order: Replicate, envelope: Envelope) -> Replicating:
        self.orders.append(order)
        return Replicating(num_here=0, num_queued=len(order.chunks))

    @property
    def keys(self) -> list[tuple[ChunkKey, ...]]:
        return [tuple(chunk.key for chunk in order.chunks) for order in self.orders]


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def deciding(broker: MemoryBroker) -> AsyncIterator[Deciding]:
    """Three nodes, of which the first holds all chunks."""
    made = Deciding(MemoryBus(broker))
    stock(made)
    yield made
    await made.copies.close()


def stock(deciding: Deciding) -> None:
    assert deciding.index is not None
    for node in (A, B, C):
        deciding.hear_node(node, 1)
        deciding.index.apply(NodeCleared(node=node, epoch=1))
    deciding.index.apply(holding(A, *KEYS))


def holding(node: NodeId, *keys: ChunkKey, tier: Tier = Tier.DRAM) -> ChunkEvent:
    metas = tuple(
        ChunkMeta(
            key=key,
            index=0,
            num_tokens=1,
            num_bytes=1,
            checksum=b"",
            request_id=RequestId("r"),
            created_ns=1,
            tier=tier,
        )
        for key in keys
    )
    return ChunkRegistered(node=node, epoch=1, chunks=metas)


async def held(node: Node) -> set[str]:
    return {name for name in NAMES if node.service.store.ledger.slots.find(key_of(name)) is not None}


async def test_of_two_copies_the_surplus_one_goes_first_and_the_other_stays(
    broker: MemoryBroker, tmp_path: Path
) -> None:
    """Both pools are under pressure at once, each in the belief that the other has what it has: all of it is left."""
    settings = {"trim_every_s": 3600.0, "copy_share": 1.0}
    deciding = Deciding(MemoryBus(broker))
    async with (
        running_node(broker, tmp_path, "node-a", num_slots=6, settings=settings) as a,
        running_node(broker, tmp_path, "node-b", num_slots=6, settings=settings) as b,
    ):
        await deciding.follow()
        await deciding.open()
        for node in (a, b):
            deciding.hear_node(node.service.node, node.client.info.epoch)
            await node.client.release(await node.write(*NAMES))
            await node.client.release(await node.write(f"own-{node.service.node}-1", f"own-{node.service.node}-2"))
        index = deciding.index
        assert index is not None
        await until(lambda: len(index) == 8 and index.nodes_of(KEYS[0]) == {A, B})
        trimmers = [
            Trimmer(node.service.store, node.bus, LOG, node=node.service.node, free_share=1.0) for node in (a, b)
        ]
        for trimmer in trimmers:
            await trimmer.open()
        await asyncio.gather(*(trimmer.look() for trimmer in trimmers))
        surplus = [node.service.store.evictor.num_surplus for node in (a, b)]
        assert sum(surplus) == 4, "of each chunk one of the two"
        for node, count in zip((a, b), surplus, strict=True):
            if count:
                new = [f"new-{node.service.node}-{number}" for number in range(count)]
                await node.client.release(await write_chunks(node.client, *new))
            own = f"own-{node.service.node}"
            assert node.service.store.ledger.slots.find(key_of(f"{own}-1")), "what nobody else has stays"
            assert node.service.store.ledger.slots.find(key_of(f"{own}-2"))
        assert await held(a) | await held(b) == set(NAMES)
        assert not await held(a) & await held(b)
        for trimmer in trimmers:
            await trimmer.close()
    await deciding.copies.close()


async def test_what_demand_wants_two_of_is_surplus_nowhere(deciding: Deciding) -> None:
    assert deciding.index is not None
    deciding.index.apply(holding(B, *KEYS))
    await deciding.open()

    async def surplus() -> set[ChunkKey]:
        asked = [AskSurplus(node=node, keys=KEYS) for node in (A, B)]
        answers = [await call(deciding.bus, subjects.SURPLUS, each, Surplus, timeout_s=5) for each in asked]
        assert not set(answers[0].keys) & set(answers[1].keys)
        return {key for answer in answers for key in answer.keys}

    assert await surplus() == set(KEYS)
    for _ in range(5):
        deciding.place(KEYS[:2])
    assert await surplus() == set(KEYS[2:])
    deciding.index.apply(holding(B, *KEYS[:3], tier=Tier.SSD))
    assert await surplus() == set(KEYS[3:]), "what another has on its SSD only is no copy"


async def test_questions_without_an_answer(deciding: Deciding) -> None:
    await deciding.open()
    too_many = AskSurplus(node=A, keys=KEYS[:1] * (MAX_ASKED + 1))
    with pytest.raises(RemoteError, match="at most 1024"):
        await call(deciding.bus, subjects.SURPLUS, too_many, Surplus, timeout_s=5)
    assert (await call(deciding.bus, subjects.SURPLUS, AskSurplus(node=C, keys=KEYS), Surplus, timeout_s=5)).keys == ()
    deciding.index = None
    with pytest.raises(RemoteError, match="no current index"):
        await call(deciding.bus, subjects.SURPLUS, AskSurplus(node=A, keys=KEYS), Surplus, timeout_s=5)


async def test_of_two_conductors_one_decides_about_a_prefix_and_each_use_counts_for_two(broker: MemoryBroker) -> None:
    listener, both = Listener(), [Deciding(MemoryBus(broker), name) for name in ("conductor-1", "conductor-2")]
    for node in (B, C):
        await listener.listen(MemoryBus(broker), node)
    for deciding in both:
        stock(deciding)
        deciding.hear_conductors("conductor-1", "conductor-2")
        deciding.place(KEYS)
        deciding.copies.look(time.monotonic())
    await asyncio.sleep(0)
    assert listener.orders == []
    for deciding in both:
        deciding.place(KEYS)
        deciding.place(KEYS)
        deciding.copies.look(time.monotonic())
    await until(lambda: sum(deciding.ordered(Cause.DEMAND, "taken") for deciding in both) == 4)
    assert listener.keys == [KEYS]
    assert {source.node for chunk in listener.orders[0].chunks for source in chunk.sources} == {A}
    for deciding in both:
        await deciding.copies.close()


async def test_a_plan_may_ask_for_a_copy_and_gets_no_more_than_the_bound(deciding: Deciding) -> None:
    listener = Listener()
    await listener.listen(deciding.bus, B)
    deciding.place(KEYS, A, Replication(A, B, 3))
    await until(lambda: deciding.ordered(Cause.OVERLOAD, "taken") == 3)
    assert listener.keys == [KEYS[:3]]
    assert listener.orders[0].cause is Cause.OVERLOAD
    deciding.place(KEYS, A, Replication(A, B, 3))
    run = Run(KEYS, 1, 1)
    assert not deciding.copies.order(Run(KEYS[:3], 1, 1), B, Cause.OVERLOAD), "it was told before"
    assert not deciding.copies.order(Run(KEYS[:3], 1, 1), C, Cause.OVERLOAD), "two copies will be there"
    assert deciding.index is not None
    deciding.index.apply(holding(B, *KEYS))
    assert not deciding.copies.order(run, C, Cause.OVERLOAD), "two copies are the bound"
    assert not deciding.copies.order(run, B, Cause.OVERLOAD), "it has all"
    assert not deciding.copies.order(run, NodeId("nobody"), Cause.OVERLOAD)


async def test_what_is_pinned_gets_a_second_copy_however_rarely_it_is_used(broker: MemoryBroker) -> None:
    deciding, listener = Deciding(MemoryBus(broker), pinned=[Run(KEYS[:3], 16, 1024)]), Listener()
    stock(deciding)
    for node in (B, C):
        await listener.listen(deciding.bus, node)
    deciding.copies.look(time.monotonic())
    await until(lambda: deciding.ordered(Cause.PINNED, "taken") == 3)
    assert listener.keys == [KEYS[:3]]
    await deciding.copies.close()


async def test_an_order_that_nobody_takes_is_given_again(deciding: Deciding) -> None:
    assert deciding.copies.order(Run(KEYS, 1, 1), B, Cause.OVERLOAD)
    await until(lambda: deciding.ordered(Cause.OVERLOAD, "failed") == 4)
    assert deciding.copies.order(Run(KEYS, 1, 1), B, Cause.OVERLOAD)


@pytest.mark.parametrize("confidence", [0.8, 0.95, 1.0])
async def test_what_nearly_always_follows_is_brought_ahead_and_at_low_confidence_nothing_moves(
    broker: MemoryBroker, confidence: float
) -> None:
    """Nine of ten prompts go on from the second chunk to the third; the tenth is another, at a node without them."""
    deciding, listener = Deciding(MemoryBus(broker), confidence=confidence), Listener()
    deciding.planner.limits = CopyLimits(max_copies=2, uses_per_copy=1e9)
    stock(deciding)
    await listener.listen(deciding.bus, B)
    for _ in range(9):
        deciding.place(KEYS[:3])
    deciding.place((*KEYS[:2], key_of("another")), B)
    if confidence == 0.8:
        await until(lambda: deciding.ordered(Cause.PREFETCH, "taken") == 1)
        assert listener.keys == [KEYS[2:3]]
    else:
        await asyncio.sleep(0)
        await deciding.copies.close()
        assert listener.orders == []
    await deciding.copies.close()
