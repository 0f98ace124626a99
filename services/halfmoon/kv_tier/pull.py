"""Pulling chunks from other nodes into this pool: one flight per chunk, however many wait for it.

For each source, best first: lease the chunks there, read them into staged slots, compare checksums, commit, and give
the lease there back. What one source can't give is sought at the next; what none can is a miss. Each wait is bounded
by the deadline of the acquire that began the flight.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import structlog

from halfmoon.bus.errors import BusError
from halfmoon.chunks.checksum import checksum
from halfmoon.kv_tier.ledger import LeaseGone, Misfit
from halfmoon.kv_tier.policy import next_source
from halfmoon.kv_tier.slots import Slot
from halfmoon.kv_tier.store import ChunkStore
from halfmoon.schemas.chunks import ChunkMeta, ChunkOutcome, Tier
from halfmoon.schemas.ids import ChunkKey, LeaseId, NodeId, RequestId, WorkerId, new_lease_id
from halfmoon.schemas.kv_tier import (
    Acquire,
    Acquired,
    AcquiredChunk,
    ChunkSource,
    NodeInfo,
    Report,
    WantedChunk,
    WrittenChunk,
)
from halfmoon.tracing import Context, Tracer, attributes, names, traceparent
from halfmoon.transport.choice import read_by_any
from halfmoon.transport.protocol import ReadOutcome, SliceRead, SliceResult, Transport

_NEVER_NS = 2**62
_RELEASE_TIMEOUT_S = 2.0
_INLINE_CHECK_BYTES = 1 << 20
_FAILURES = {ReadOutcome.STALE: ChunkOutcome.EXPIRED, ReadOutcome.REFUSED: ChunkOutcome.EXPIRED}


class Peers(Protocol):
    """What a pull asks of other nodes' kv-tiers. Raises `BusError`."""

    async def describe(self, source: ChunkSource, deadline_ns: int) -> NodeInfo: ...

    async def acquire(self, node: NodeId, request: Acquire, deadline_ns: int, context: Context) -> Acquired: ...

    async def release(self, node: NodeId, lease_id: LeaseId, timeout_s: float) -> None: ...

    async def report(self, node: NodeId, report: Report) -> None: ...


@dataclass(frozen=True, slots=True)
class PullRequest:
    """What one acquire wants pulled."""

    request_id: RequestId
    lease_id: LeaseId
    keep: bool
    deadline_ns: int
    context: Context


@dataclass(slots=True)
class _Flight:
    """One chunk on its way, or on its way to be a miss."""

    chunk: WantedChunk
    request: PullRequest
    """Of the acquire that began it."""
    landed: asyncio.Future[AcquiredChunk]
    waiting: list[PullRequest]
    started_ns: int
    tried: set[ChunkSource] = field(default_factory=set)
    failure: ChunkOutcome = ChunkOutcome.MISS
    detail: str = ""

    def failed(self, outcome: ChunkOutcome, detail: str) -> None:
        """Note why the last source couldn't give it. Damage is remembered over mere absence."""
        if outcome is not ChunkOutcome.MISS or self.failure is ChunkOutcome.MISS:
            self.failure = outcome
        self.detail = f"{self.detail}; {detail}" if self.detail else detail


@dataclass(slots=True)
class _Arrival:
    """A chunk that is being read into a staged slot."""

    flight: _Flight
    slot: Slot
    generation: int
    meta: ChunkMeta
    read: SliceRead
    checksum: bytes


class Puller:
    """Owns every flight. `close` cancels what is in the air and waits until no slot is written to any more."""

    def __init__(
        self,
        store: ChunkStore,
        peers: Peers,
        transports: Sequence[Transport],
        tracer: Tracer,
        log: structlog.stdlib.BoundLogger,
        *,
        node: NodeId,
        holder: WorkerId,
        max_batches: int = 4,
        batch_chunks: int = 8,
    ) -> None:
        """`max_batches` transfers run at once, each of at most `batch_chunks` chunks from one source."""
        self._store = store
        self._peers = peers
        self._transports = transports
        self._tracer = tracer
        self._log = log
        self._node = node
        self._holder = holder
        self._batch_chunks = batch_chunks
        self._running = asyncio.Semaphore(max_batches)
        self._flights: dict[ChunkKey, _Flight] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def num_flights(self) -> int:
        """Chunks on their way or in line."""
        return len(self._flights)

    async def pull(self, request: PullRequest, chunks: Sequence[WantedChunk]) -> list[AcquiredChunk]:
        """Bring these chunks here, leased to the request's lease. Raises nothing but `CancelledError`."""
        joined = {chunk.key for chunk in chunks if chunk.key in self._flights}
        flights = [self._join(request, chunk) for chunk in chunks]
        self._dispatch(flight for flight in flights if flight.request is request and not flight.tried)
        results = [await self._landing(request, flight) for flight in flights]
        # Somebody else's flight may have failed on its own sources or deadline: ours may do better.
        again = [
            position
            for position, (chunk, result) in enumerate(zip(chunks, results, strict=True))
            if result.slot is None and chunk.key in joined and time.time_ns() < request.deadline_ns
        ]
        if again:
            repeated = await self.pull(request, [chunks[position] for position in again])
            for position, result in zip(again, repeated, strict=True):
                results[position] = result
        return results

    async def close(self) -> None:
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for flight in list(self._flights.values()):
            self._miss(flight)

    def _join(self, request: PullRequest, chunk: WantedChunk) -> _Flight:
        flight = self._flights.get(chunk.key)
        if flight is None:
            landed: asyncio.Future[AcquiredChunk] = asyncio.get_running_loop().create_future()
            flight = _Flight(chunk, request, landed, [], time.time_ns())
            self._flights[chunk.key] = flight
        flight.waiting.append(request)
        return flight

    async def _landing(self, request: PullRequest, flight: _Flight) -> AcquiredChunk:
        """The flight's end, as this request sees it."""
        try:
            async with asyncio.timeout((request.deadline_ns - time.time_ns()) / 1e9):
                result = await asyncio.shield(flight.landed)
        except TimeoutError:
            if request in flight.waiting:
                flight.waiting.remove(request)
            return _missed(flight, ChunkOutcome.MISS, "the deadline came before the chunk")
        if result.slot is None:
            return result
        lease = self._store.ledger.leases.get(request.lease_id)
        if lease is None or lease.slots.get(result.slot.slot) != result.slot.generation:
            return _missed(flight, ChunkOutcome.EXPIRED, "the lease it was pulled for has expired")
        return result

    def _dispatch(self, flights: Iterable[_Flight]) -> None:
        """Send each flight to its next source, in batches; land those that have none left."""
        by_source: dict[ChunkSource, list[_Flight]] = {}
        for flight in flights:
            source = next_source(flight.chunk.sources, flight.tried, self._node)
            if source is None or self._closed or time.time_ns() >= flight.request.deadline_ns:
                self._miss(flight)
            else:
                flight.tried.add(source)
                by_source.setdefault(source, []).append(flight)
        for source, group in by_source.items():
            for start in range(0, len(group), self._batch_chunks):
                self._own(self._fetch(source, group[start : start + self._batch_chunks]))

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fetch(self, source: ChunkSource, flights: list[_Flight]) -> None:
        """One batch from one source; what it can't give goes on to the next."""
        request = flights[0].request
        try:
            async with asyncio.timeout((request.deadline_ns - time.time_ns()) / 1e9), self._running:
                await self._fetch_from(source, flights, request)
        except TimeoutError:
            self._fail(flights, ChunkOutcome.MISS, f"node {source.node} took longer than there was time for")
        except (BusError, LeaseGone, Misfit) as error:
            self._fail(flights, ChunkOutcome.MISS, f"node {source.node}: {error}")
        except Exception as error:
            # A defect here, or an answer that nobody should give: those who wait must not wait for their deadlines.
            self._log.error("a pull failed", source=source.node, exc_info=error)
            self._fail(flights, ChunkOutcome.MISS, f"node {source.node}: {type(error).__name__}")
        self._dispatch(flight for flight in flights if not flight.landed.done())

    async def _fetch_from(self, source: ChunkSource, flights: list[_Flight], request: PullRequest) -> None:
        info = await self._peers.describe(source, request.deadline_ns)
        if info.epoch != source.epoch:
            self._fail(flights, ChunkOutcome.MISS, f"node {source.node} has restarted since, empty")
            return
        wanted = tuple(msgspec.structs.replace(flight.chunk, sources=()) for flight in flights)
        left_s = (request.deadline_ns - time.time_ns()) / 1e9
        acquired = await self._peers.acquire(
            source.node,
            Acquire(request_id=request.request_id, holder=self._holder, chunks=wanted, lease_s=max(left_s, 0.0) + 1.0),
            request.deadline_ns,
            request.context,
        )
        own_lease = new_lease_id()
        self._store.ledger.open_lease(own_lease, self._holder, request.request_id, _NEVER_NS)
        try:
            arrivals = self._stage(own_lease, source, flights, acquired)
            results = await read_by_any(
                self._transports,
                info,
                acquired.lease_id,
                [arrival.read for arrival in arrivals],
                deadline_ns=request.deadline_ns,
            )
            for arrival, (result, transport) in zip(arrivals, results, strict=True):
                await self._land(own_lease, source, arrival, result, transport)
        finally:
            # No transport writes any more: what is staged still can go, and what has landed is its waiters'.
            self._store.ledger.release(own_lease, self._store.clock_ns())
            if not self._closed:
                self._own(self._give_back(source.node, acquired.lease_id))

    def _stage(
        self, own_lease: LeaseId, source: ChunkSource, flights: list[_Flight], acquired: Acquired
    ) -> list[_Arrival]:
        """Slots for what the source has."""
        arrivals: list[_Arrival] = []
        for flight, offered in zip(flights, acquired.chunks, strict=True):
            key, num_bytes = flight.chunk.key, flight.chunk.num_bytes
            if offered.slot is None or offered.meta is None:
                self._fail([flight], ChunkOutcome.MISS, f"node {source.node} doesn't have it")
            elif offered.key != key or offered.slot.num_bytes != num_bytes:
                detail = f"node {source.node} has {offered.slot.num_bytes} bytes of it, not {num_bytes}"
                self._fail([flight], ChunkOutcome.MISS, detail)
            elif (slot := self._store.reserve(own_lease, key, num_bytes)) is None:
                self._fail([flight], ChunkOutcome.MISS, "this pool has no room: every slot is in use")
            else:
                destination = self._store.payload(slot)
                read = SliceRead(offered.slot.slot, offered.slot.generation, 0, destination)
                arrivals.append(_Arrival(flight, slot, slot.generation, offered.meta, read, offered.slot.checksum))
        return arrivals

    async def _land(
        self, own_lease: LeaseId, source: ChunkSource, arrival: _Arrival, result: SliceResult, transport: str
    ) -> None:
        """Judge one read: commit it and hand it to those who wait, or note why not."""
        flight, detail = arrival.flight, result.detail
        failure: ChunkOutcome | None = None
        if result.outcome is not ReadOutcome.OK:
            failure = _FAILURES.get(result.outcome, ChunkOutcome.MISS)
        elif await _checksum_of(arrival.read.destination) != arrival.checksum:
            failure = ChunkOutcome.CORRUPT
            detail = "the payload's checksum is wrong"
            self._log.warning("corrupt chunk", source=source.node, key=flight.chunk.key.hex(), transport=transport)
            await self._report(source.node, arrival)
        self._trace(source, arrival, result, transport, failure)
        if failure is not None:
            self._fail([flight], failure, f"node {source.node}: {detail}")
            return
        keep = any(each.keep for each in flight.waiting)
        now_ns = self._store.clock_ns()
        meta = msgspec.structs.replace(
            arrival.meta, tier=Tier.DRAM, checksum=arrival.checksum, hits=0, last_access_ns=now_ns
        )
        written = WrittenChunk(slot=arrival.slot.number, generation=arrival.generation, meta=meta, register=keep)
        self._store.commit(own_lease, [written], traceparent(flight.request.context))
        self._store.counters.bytes_pulled += arrival.slot.num_bytes
        for waiting in flight.waiting:
            lease = self._store.ledger.leases.get(waiting.lease_id)
            if lease is not None and lease.expires_ns > now_ns:
                self._store.ledger.share(lease, arrival.slot, now_ns)
        self._end(
            flight,
            AcquiredChunk(
                key=flight.chunk.key,
                index=flight.chunk.index,
                outcome=ChunkOutcome.HIT_REMOTE,
                slot=self._store.reference(arrival.slot),
                meta=meta,
                source=source.node,
                transport=transport,
                num_bytes_moved=arrival.slot.num_bytes,
                started_ns=flight.started_ns,
                transfer_started_ns=result.started_ns,
                finished_ns=result.finished_ns,
            ),
        )

    def _trace(
        self,
        source: ChunkSource,
        arrival: _Arrival,
        result: SliceResult,
        transport: str,
        failure: ChunkOutcome | None,
    ) -> None:
        flight = arrival.flight
        outcome = failure or ChunkOutcome.HIT_REMOTE
        facts = attributes.ChunkFacts(
            request_id=flight.request.request_id,
            key=flight.chunk.key,
            index=flight.chunk.index,
            outcome=outcome,
            tier=Tier.DRAM,
            num_bytes=flight.chunk.num_bytes,
            num_tokens=flight.chunk.num_tokens,
            source=source.node,
            destination=self._node,
            transport=transport or None,
            queue_wait_ms=(result.started_ns - flight.started_ns) / 1e6,
            transfer_ms=(result.finished_ns - result.started_ns) / 1e6,
        )
        self._tracer.record_span(
            names.KVTIER_TRANSFER,
            result.started_ns,
            result.finished_ns,
            parent=flight.request.context,
            attributes=facts.attributes(),
        )

    def _fail(self, flights: Iterable[_Flight], outcome: ChunkOutcome, detail: str) -> None:
        for flight in flights:
            if not flight.landed.done():
                flight.failed(outcome, detail)

    def _miss(self, flight: _Flight) -> None:
        self._end(flight, _missed(flight, flight.failure, flight.detail or "no source is left to ask"))

    def _end(self, flight: _Flight, result: AcquiredChunk) -> None:
        if self._flights.get(flight.chunk.key) is flight:
            del self._flights[flight.chunk.key]
        if not flight.landed.done():
            flight.landed.set_result(result)

    async def _report(self, node: NodeId, arrival: _Arrival) -> None:
        """The damage may have been done there, or on the way: that node looks."""
        report = Report(key=arrival.flight.chunk.key, slot=arrival.read.slot, generation=arrival.read.generation)
        try:
            await self._peers.report(node, report)
        except BusError as error:
            self._log.info("a peer can't be told of a damaged chunk", node=node, error=str(error))

    async def _give_back(self, node: NodeId, lease_id: LeaseId) -> None:
        try:
            await self._peers.release(node, lease_id, _RELEASE_TIMEOUT_S)
        except BusError as error:
            self._log.info("a peer's lease is left to expire", node=node, lease_id=lease_id, error=str(error))


def _missed(flight: _Flight, outcome: ChunkOutcome, detail: str) -> AcquiredChunk:
    return AcquiredChunk(
        key=flight.chunk.key,
        index=flight.chunk.index,
        outcome=outcome,
        started_ns=flight.started_ns,
        finished_ns=time.time_ns(),
        detail=detail,
    )


async def _checksum_of(payload: memoryview) -> bytes:
    if len(payload) <= _INLINE_CHECK_BYTES:
        return checksum(payload)
    return await asyncio.to_thread(checksum, payload)
