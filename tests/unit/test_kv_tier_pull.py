"""Pulls that hang, fail or are given up at each of their steps: the pool is consistent afterwards, every time."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import structlog

from halfmoon.bus.errors import BusError, NoResponders
from halfmoon.chunks.checksum import checksum
from halfmoon.kv_tier.events import Announcer, Outbox
from halfmoon.kv_tier.flights import PullRequest
from halfmoon.kv_tier.pull import Puller
from halfmoon.kv_tier.store import ChunkStore
from halfmoon.pool.arena import Arena
from halfmoon.schemas.chunks import ChunkEvent, ChunkMeta, ChunkOutcome
from halfmoon.schemas.ids import LeaseId, NodeId, RequestId, WorkerId
from halfmoon.schemas.kv_tier import (
    Acquire,
    Acquired,
    AcquiredChunk,
    ChunkSource,
    NodeInfo,
    Renew,
    Renewed,
    Report,
    SlotRef,
    WantedChunk,
)
from halfmoon.tracing import Context, noop_tracer
from halfmoon.transport.choice import Paths
from halfmoon.transport.protocol import ReadOutcome, SliceRead, SliceResult
from support.pool_nodes import CHUNK_BYTES, SLOT_BYTES, content_of, key_of
from support.wait import until

SOURCE = ChunkSource(node=NodeId("far"), epoch=3)
INFO = NodeInfo(node=NodeId("far"), epoch=3, host="h", arena_path="", slot_bytes=SLOT_BYTES, num_slots=8)
WORKER = WorkerId("w")
STEPS = ["describe", "acquire", "read"]


class Gate:
    """Lets everything through but one step, where it holds, or raises."""

    def __init__(self) -> None:
        self.closed_at = ""
        self.error: Exception | None = None
        self.open = asyncio.Event()
        self.waiting = 0
        self.passed: list[str] = []

    async def __call__(self, step: str) -> None:
        if step == self.closed_at:
            if self.error is not None:
                raise self.error
            self.waiting += 1
            try:
                await self.open.wait()
            finally:
                self.waiting -= 1
        self.passed.append(step)


class FarNode:
    """A source, and the transport to it, whose every step goes through a gate."""

    name = "gated"

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.released: list[LeaseId] = []
        self.renewed: list[Renew] = []
        self.reports: list[Report] = []
        self.damages = ""
        """Name of the chunk of which the first byte is turned on the way."""
        self.names: dict[bytes, str] = {}

    async def describe(self, source: ChunkSource, deadline_ns: int) -> NodeInfo:
        await self._gate("describe")
        return INFO

    async def acquire(self, node: NodeId, request: Acquire, deadline_ns: int, context: Context) -> Acquired:
        await self._gate("acquire")
        chunks = []
        for number, wanted in enumerate(request.chunks):
            sum_ = checksum(content_of(self.names[wanted.key]))
            meta = ChunkMeta(
                key=wanted.key,
                index=wanted.index,
                num_tokens=4,
                num_bytes=CHUNK_BYTES,
                checksum=sum_,
                request_id=RequestId("r"),
                created_ns=1,
            )
            slot = SlotRef(slot=number, generation=1, num_bytes=CHUNK_BYTES, checksum=sum_)
            chunks.append(
                AcquiredChunk(key=wanted.key, index=wanted.index, outcome=ChunkOutcome.HIT_LOCAL, slot=slot, meta=meta)
            )
        self.batch = [self.names[wanted.key] for wanted in request.chunks]
        return Acquired(lease_id=LeaseId("far-lease"), expires_ns=0, chunks=tuple(chunks), epoch=3)

    async def renew(self, node: NodeId, request: Renew, timeout_s: float) -> Renewed:
        self.renewed.append(request)
        return Renewed()

    async def release(self, node: NodeId, lease_id: LeaseId, timeout_s: float) -> None:
        self.released.append(lease_id)

    async def report(self, node: NodeId, report: Report) -> None:
        self.reports.append(report)

    def unavailable(self, peer: NodeInfo) -> str | None:
        return None

    async def read(
        self, peer: NodeInfo, lease_id: LeaseId, slices: Sequence[SliceRead], *, deadline_ns: int
    ) -> list[SliceResult]:
        await self._gate("read")
        now_ns = time.time_ns()
        for each in slices:
            each.destination[:] = content_of(self.batch[each.slot])
            if self.batch[each.slot] == self.damages:
                each.destination[0] ^= 1
        return [SliceResult(ReadOutcome.OK, now_ns, now_ns) for _ in slices]

    async def close(self) -> None:
        return None


class Rig:
    """A store and a puller on a gated source."""

    def __init__(self, arena: Arena) -> None:
        async def publish(event: ChunkEvent) -> None:
            return None

        self.gate = Gate()
        self.far = FarNode(self.gate)
        announcer = Announcer(Outbox(NodeId("near"), 1), publish, lambda error: None)
        self.store = ChunkStore(arena, 1, announcer, noop_tracer())
        self.puller = Puller(
            self.store,
            self.far,
            Paths([self.far]),
            noop_tracer(),
            structlog.stdlib.get_logger("test"),
            node=NodeId("near"),
            holder=WORKER,
        )
        self.num_leases = 0

    def request(self, timeout_s: float = 20.0, *, keep: bool = False, lease_s: float = 60.0) -> PullRequest:
        self.num_leases += 1
        lease_id = LeaseId(f"lease-{self.num_leases}")
        self.store.ledger.open_lease(lease_id, WORKER, RequestId("r"), time.time_ns() + int(lease_s * 1e9))
        return PullRequest(RequestId("r"), lease_id, keep, time.time_ns() + int(timeout_s * 1e9), Context())

    def wanted(self, *names: str) -> list[WantedChunk]:
        self.far.names |= {key_of(name): name for name in names}
        return [
            WantedChunk(key=key_of(name), index=0, num_tokens=4, num_bytes=CHUNK_BYTES, sources=(SOURCE,))
            for name in names
        ]

    def release(self, request: PullRequest) -> None:
        self.store.ledger.release(request.lease_id, time.time_ns())

    @property
    def free(self) -> int:
        self.store.ledger.check_integrity()
        return self.store.ledger.slots.counts().free


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    arena = Arena.create(tmp_path / "arena", SLOT_BYTES, 4)
    made = Rig(arena)
    yield made
    await made.puller.close()
    assert made.puller.num_flights == 0
    arena.close()


def outcomes(chunks: Sequence[AcquiredChunk]) -> list[ChunkOutcome]:
    return [chunk.outcome for chunk in chunks]


async def test_a_damaged_arrival_is_no_hit_and_is_reported_where_it_came_from(rig: Rig) -> None:
    rig.far.damages = "b"
    request = rig.request()
    got = await rig.puller.pull(request, rig.wanted("a", "b"))
    assert outcomes(got) == [ChunkOutcome.HIT_REMOTE, ChunkOutcome.CORRUPT]
    assert rig.far.reports == [Report(key=key_of("b"), slot=1, generation=1)]
    rig.release(request)
    assert rig.free == 4


@pytest.mark.parametrize("step", STEPS)
async def test_a_step_that_hangs_costs_its_deadline_and_nothing_stays_behind(rig: Rig, step: str) -> None:
    rig.gate.closed_at = step
    request = rig.request(0.1)
    chunks = await rig.puller.pull(request, rig.wanted("a", "b"))
    assert outcomes(chunks) == [ChunkOutcome.MISS] * 2
    await until(lambda: rig.puller.num_flights == 0 and rig.gate.waiting == 0)
    assert rig.free == 4
    await until(lambda: rig.far.released == ([LeaseId("far-lease")] if step == "read" else []))
    rig.gate.closed_at = ""
    again = rig.request()
    chunks = await rig.puller.pull(again, rig.wanted("a", "b"))
    assert outcomes(chunks) == [ChunkOutcome.HIT_REMOTE] * 2
    assert rig.free == 2
    rig.release(again)
    assert rig.free == 4


@pytest.mark.parametrize("step", STEPS)
async def test_a_close_at_any_step_frees_what_was_staged_and_answers_who_waits(rig: Rig, step: str) -> None:
    rig.gate.closed_at = step
    pulling = asyncio.create_task(rig.puller.pull(rig.request(), rig.wanted("a", "b")))
    await until(lambda: rig.gate.waiting == 1)
    assert rig.free == (2 if step == "read" else 4)
    await rig.puller.close()
    assert outcomes(await pulling) == [ChunkOutcome.MISS] * 2
    assert rig.free == 4
    chunks = await rig.puller.pull(rig.request(), rig.wanted("a"))
    assert outcomes(chunks) == [ChunkOutcome.MISS]


@pytest.mark.parametrize("step", STEPS)
async def test_a_cancelled_asker_leaves_the_flight_to_those_who_joined_it(rig: Rig, step: str) -> None:
    rig.gate.closed_at = step
    first, second = rig.request(), rig.request()
    asking = asyncio.create_task(rig.puller.pull(first, rig.wanted("a")))
    await until(lambda: rig.gate.waiting == 1)
    joining = asyncio.create_task(rig.puller.pull(second, rig.wanted("a")))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    rig.release(first)
    rig.gate.open.set()
    assert outcomes(await joining) == [ChunkOutcome.HIT_REMOTE]
    assert rig.gate.passed == STEPS
    assert rig.free == 3
    rig.release(second)
    assert rig.free == 4


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", [NoResponders("s"), BusError("b"), RuntimeError("a defect")])
async def test_a_step_that_fails_is_a_miss_with_its_reason(rig: Rig, step: str, error: Exception) -> None:
    rig.gate.closed_at, rig.gate.error = step, error
    chunks = await rig.puller.pull(rig.request(), rig.wanted("a"))
    assert outcomes(chunks) == [ChunkOutcome.MISS]
    assert "far" in chunks[0].detail
    assert rig.free == 4
    assert rig.puller.num_flights == 0


async def test_who_joined_a_flight_that_failed_for_its_asker_tries_again(rig: Rig) -> None:
    rig.gate.closed_at = "acquire"
    hasty, patient = rig.request(0.1), rig.request(20)
    asking = asyncio.create_task(rig.puller.pull(hasty, rig.wanted("a")))
    await until(lambda: rig.gate.waiting == 1)
    joining = asyncio.create_task(rig.puller.pull(patient, rig.wanted("a")))
    assert outcomes(await asking) == [ChunkOutcome.MISS]
    rig.gate.open.set()
    assert outcomes(await joining) == [ChunkOutcome.HIT_REMOTE]
    rig.release(hasty)
    rig.release(patient)
    assert rig.free == 4


async def test_a_lease_that_expired_before_its_chunk_arrived_is_told_so(rig: Rig) -> None:
    rig.gate.closed_at = "read"
    short, long = rig.request(lease_s=0.05), rig.request()
    first = asyncio.create_task(rig.puller.pull(short, rig.wanted("a")))
    second = asyncio.create_task(rig.puller.pull(long, rig.wanted("a")))
    await until(lambda: rig.gate.waiting == 1 and rig.store.expire() == 1)
    rig.gate.open.set()
    assert outcomes(await first) == [ChunkOutcome.EXPIRED]
    assert outcomes(await second) == [ChunkOutcome.HIT_REMOTE]
    rig.release(long)
    assert rig.free == 4


async def test_a_flight_is_kept_where_any_of_those_who_wait_wants_that(rig: Rig) -> None:
    rig.gate.closed_at = "read"
    requests = [rig.request(keep=keep) for keep in (False, True, False)]
    pulls = [asyncio.create_task(rig.puller.pull(request, rig.wanted("a"))) for request in requests]
    await until(lambda: rig.gate.waiting == 1)
    rig.gate.open.set()
    slots = {(await pull)[0].slot for pull in pulls}
    assert len(slots) == 1
    for request in requests:
        rig.release(request)
    assert rig.free == 3
    assert rig.store.ledger.slots.num_registered == 1


async def test_no_more_batches_run_at_once_than_allowed(rig: Rig) -> None:
    rig.gate.closed_at = "describe"
    names = [f"chunk-{number}" for number in range(40)]
    pulling = asyncio.create_task(rig.puller.pull(rig.request(1.0), rig.wanted(*names)))
    await until(lambda: rig.gate.waiting == 4)
    assert rig.puller.num_flights == 40
    rig.gate.open.set()
    chunks = await pulling
    hits = [chunk for chunk in chunks if chunk.slot is not None]
    assert len(hits) == 4, "the pool has four slots"
    assert {chunk.outcome for chunk in chunks if chunk.slot is None} == {ChunkOutcome.MISS}
