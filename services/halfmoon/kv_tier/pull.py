"""Pulling chunks from other nodes into this pool: one flight per chunk, however many wait for it.

For each source, best first: lease the chunks there, read them into staged slots, compare checksums, commit, and give
the lease there back. What one source can't give is sought at the next; what none can is a miss. Each wait is bounded
by the deadline of the acquire that began the flight.

A source on this host, and readers that want no copy of their own: then nothing is read, the readers get the source's
slots, and the lease there is held for them (`loans`).
"""

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

import msgspec
import structlog

from halfmoon.bus.errors import BusError
from halfmoon.kv_tier.flights import Arrival, Flight, PullRequest
from halfmoon.kv_tier.flow import Flow
from halfmoon.kv_tier.landing import Landing
from halfmoon.kv_tier.ledger import LeaseGone, Misfit
from halfmoon.kv_tier.loans import Loans
from halfmoon.kv_tier.peers import Peers
from halfmoon.kv_tier.policy import next_source
from halfmoon.kv_tier.store import ChunkStore
from halfmoon.schemas.chunks import ChunkOutcome
from halfmoon.schemas.ids import ChunkKey, LeaseId, NodeId, WorkerId, new_lease_id
from halfmoon.schemas.kv_tier import NOBODY, Acquire, Acquired, AcquiredChunk, ChunkSource, NodeInfo, WantedChunk
from halfmoon.tasks import ended
from halfmoon.tracing import Tracer
from halfmoon.transport.choice import Paths
from halfmoon.transport.protocol import SliceRead, SliceResult

_NEVER_NS = 2**62
_RELEASE_TIMEOUT_S = 2.0
_READ_SHARE = 0.95
"""Of the time that is left: a read ends before its flight is given up, so that what hung is known, and remembered."""
_IN_PLACE = "shm"
"""The transport whose peers' arenas can be mapped here."""


class Puller:
    """Owns every flight. `close` cancels what is in the air and waits until no slot is written to any more."""

    def __init__(
        self,
        store: ChunkStore,
        peers: Peers,
        paths: Paths,
        tracer: Tracer,
        log: structlog.stdlib.BoundLogger,
        *,
        node: NodeId,
        holder: WorkerId,
        max_batches: int = 4,
        batch_chunks: int = 8,
        in_place: bool = True,
    ) -> None:
        """`max_batches` transfers run at once, each of at most `batch_chunks` chunks from one source.

        `in_place`: whether readers get slots of other arenas on this host, where they ask for that.
        """
        self._store = store
        self._peers = peers
        self._paths = paths
        self._landing = Landing(store, peers, tracer, log, node)
        self._loans = Loans(peers)
        self._log = log
        self._node = node
        self._holder = holder
        self._batch_chunks = batch_chunks
        self._in_place = in_place
        self._running = asyncio.Semaphore(max_batches)
        self.flow = Flow()
        self._flights: dict[ChunkKey, Flight] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def num_flights(self) -> int:
        """Chunks on their way or in line."""
        return len(self._flights)

    @property
    def has_line(self) -> bool:
        """Whether one more pull would have to wait for its turn."""
        return self._running.locked()

    def is_coming(self, key: ChunkKey) -> bool:
        return key in self._flights

    @property
    def num_loans(self) -> int:
        """Leases at other nodes that are held for readers here."""
        return len(self._loans)

    def settle(self) -> None:
        """Give back what was lent to readers whose own leases have gone. To be called after leases went."""
        if not self._closed:
            for node, lease_id in self._loans.settle(self._is_live):
                self._own(self._give_back(node, lease_id))

    async def pull(self, request: PullRequest, chunks: Sequence[WantedChunk]) -> list[AcquiredChunk]:
        """Bring these chunks here, leased to the request's lease. Raises nothing but `CancelledError`."""
        joined = {chunk.key for chunk in chunks if chunk.key in self._flights}
        flights = [self._join(request, chunk) for chunk in chunks]
        self._dispatch(flight for flight in flights if flight.request is request and not flight.tried)
        results = [await self._arrival(request, flight) for flight in flights]
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
        await ended(*self._tasks)
        for flight in list(self._flights.values()):
            self._miss(flight)
        lent = await self._loans.close()
        await asyncio.gather(*(self._give_back(node, lease_id) for node, lease_id in lent))

    def _join(self, request: PullRequest, chunk: WantedChunk) -> Flight:
        flight = self._flights.get(chunk.key)
        if flight is None:
            landed: asyncio.Future[AcquiredChunk] = asyncio.get_running_loop().create_future()
            flight = Flight(chunk, request, landed, [], time.time_ns())
            self._flights[chunk.key] = flight
        flight.waiting.append(request)
        return flight

    async def _arrival(self, request: PullRequest, flight: Flight) -> AcquiredChunk:
        """The flight's end, as this request sees it."""
        try:
            async with asyncio.timeout((request.deadline_ns - time.time_ns()) / 1e9):
                result = await asyncio.shield(flight.landed)
        except TimeoutError:
            if request in flight.waiting:
                flight.waiting.remove(request)
            asked = ", ".join(sorted(source.node for source in flight.tried)) or "none"
            return flight.missed_as(ChunkOutcome.MISS, f"the deadline came before the chunk did (nodes asked: {asked})")
        if result.slot is None:
            return result
        lease = self._store.ledger.leases.get(request.lease_id)
        is_elsewhere = result.slot.arena is not None
        if lease is None or not (is_elsewhere or lease.slots.get(result.slot.slot) == result.slot.generation):
            return flight.missed_as(ChunkOutcome.EXPIRED, "the lease it was pulled for has expired")
        return result

    def _dispatch(self, flights: Iterable[Flight]) -> None:
        """Send each flight to its next source, in batches; land those that have none left."""
        by_source: dict[ChunkSource, list[Flight]] = {}
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

    async def _fetch(self, source: ChunkSource, flights: list[Flight]) -> None:
        """One batch from one source; what it can't give goes on to the next."""
        request = flights[0].request
        try:
            # What nobody waits for takes nobody's turn: it is little at a time, and begins where nobody has to wait.
            turn = contextlib.nullcontext() if request.unasked else self._running
            async with asyncio.timeout((request.deadline_ns - time.time_ns()) / 1e9), turn:
                await self._timed_fetch(source, flights, request)
        except TimeoutError:
            self._fail(flights, ChunkOutcome.MISS, f"node {source.node} took longer than there was time for")
        except (BusError, LeaseGone, Misfit) as error:
            self._fail(flights, ChunkOutcome.MISS, f"node {source.node}: {error}")
        except Exception as error:
            # A defect here, or an answer that nobody should give: those who wait must not wait for their deadlines.
            self._log.error("a pull failed", source=source.node, exc_info=error)
            self._fail(flights, ChunkOutcome.MISS, f"node {source.node}: {type(error).__name__}")
        self._dispatch(flight for flight in flights if not flight.landed.done())

    async def _timed_fetch(self, source: ChunkSource, flights: list[Flight], request: PullRequest) -> None:
        num_bytes = sum(flight.chunk.num_bytes for flight in flights)
        pulling = self.flow.begin(source.node, num_bytes, time.time_ns())
        try:
            await self._fetch_from(source, flights, request)
        finally:
            is_whole = all(flight.landed.done() and flight.landed.result().slot is not None for flight in flights)
            pulling.end(time.time_ns(), is_whole=is_whole)

    async def _fetch_from(self, source: ChunkSource, flights: list[Flight], request: PullRequest) -> None:
        info = await self._peers.describe(source, request.deadline_ns)
        if info.epoch != source.epoch:
            self._fail(flights, ChunkOutcome.MISS, f"node {source.node} has restarted since, empty")
            return
        wanted = tuple(msgspec.structs.replace(flight.chunk, sources=()) for flight in flights)
        left_s = (request.deadline_ns - time.time_ns()) / 1e9
        acquired = await self._peers.acquire(
            source.node,
            Acquire(
                request_id=request.request_id,
                holder=self._holder,
                chunks=wanted,
                lease_s=max(left_s, 0.0) + 1.0,
                unasked=request.unasked,
                direct=all(any(each.keep for each in flight.waiting) for flight in flights),
                tenant=NOBODY,
            ),
            request.deadline_ns,
            request.context,
        )
        is_lent = self._lend(source, info, flights, acquired)
        own_lease = new_lease_id()
        self._store.ledger.open_lease(own_lease, self._holder, request.request_id, _NEVER_NS)
        try:
            arrivals = self._stage(own_lease, source, flights, acquired)
            now_ns = time.time_ns()
            results = await self._paths.read(
                info,
                acquired.lease_id,
                [arrival.read for arrival in arrivals],
                deadline_ns=now_ns + int(_READ_SHARE * (request.deadline_ns - now_ns)),
            )
            for arrival, (result, transport) in zip(arrivals, results, strict=True):
                await self._land(own_lease, source, arrival, result, transport)
        finally:
            # No transport writes any more: what is staged still can go, and what has landed is its waiters'.
            self._store.ledger.release(own_lease, self._store.clock_ns())
            if not self._closed and not is_lent:
                self._own(self._give_back(source.node, acquired.lease_id))

    def _lend(self, source: ChunkSource, info: NodeInfo, flights: list[Flight], acquired: Acquired) -> bool:
        """Land the flights that can end in the source's own slots; whether there were any."""
        if not self._in_place or all(each.name != _IN_PLACE for each in self._paths.choose(info).usable):
            return False
        readers: set[LeaseId] = set()
        lease_s = 0.0
        for flight, offered in zip(flights, acquired.chunks, strict=True):
            if offered.slot is None or offered.meta is None or any(each.needs_copy for each in flight.waiting):
                continue
            if offered.key != flight.chunk.key or offered.slot.num_bytes != flight.chunk.num_bytes:
                continue
            if self._store.is_stale(offered.meta, flight.request.request_id):
                continue
            waiting = [each for each in flight.waiting if self._is_live(each.lease_id)]
            readers.update(each.lease_id for each in waiting)
            lease_s = max([lease_s, *(each.lease_s for each in waiting)])
            self._end(flight, self._landing.lend(source, info, flight, offered.slot, offered.meta, _IN_PLACE))
        if readers:
            self._loans.borrow(source.node, acquired.lease_id, lease_s, readers)
        return bool(readers)

    def _stage(
        self, own_lease: LeaseId, source: ChunkSource, flights: list[Flight], acquired: Acquired
    ) -> list[Arrival]:
        """Slots for what the source has."""
        arrivals: list[Arrival] = []
        for flight, offered in zip(flights, acquired.chunks, strict=True):
            if flight.landed.done():
                continue
            key, num_bytes = flight.chunk.key, flight.chunk.num_bytes
            if offered.slot is None or offered.meta is None:
                self._fail([flight], ChunkOutcome.MISS, f"node {source.node} doesn't have it")
            elif offered.key != key or offered.slot.num_bytes != num_bytes:
                detail = f"node {source.node} has {offered.slot.num_bytes} bytes of it, not {num_bytes}"
                self._fail([flight], ChunkOutcome.MISS, detail)
            elif self._store.is_stale(offered.meta, flight.request.request_id):
                self._fail([flight], ChunkOutcome.MISS, f"node {source.node}: it was flushed")
            elif (slot := self._store.reserve(own_lease, key, num_bytes, offered.meta.tenant)) is None:
                detail = "this pool has no room: every slot is in use, or reserved for other tenants"
                self._fail([flight], ChunkOutcome.MISS, detail)
            else:
                destination = self._store.payload(slot)
                read = SliceRead(offered.slot.slot, offered.slot.generation, 0, destination)
                arrivals.append(
                    Arrival(
                        flight, slot, slot.generation, offered.meta, read, offered.slot.checksum, offered.traceparent
                    )
                )
        return arrivals

    async def _land(
        self, own_lease: LeaseId, source: ChunkSource, arrival: Arrival, result: SliceResult, transport: str
    ) -> None:
        """Judge one read: commit it and hand it to those who wait, or note why not."""
        failure = await self._landing.judge(source.node, arrival, result, transport)
        if failure is not None:
            outcome, detail = failure
            self._fail([arrival.flight], outcome, f"node {source.node}: {detail}")
            return
        self._end(arrival.flight, self._landing.commit(own_lease, source.node, arrival, result, transport))

    def _fail(self, flights: Iterable[Flight], outcome: ChunkOutcome, detail: str) -> None:
        for flight in flights:
            if not flight.landed.done():
                flight.failed(outcome, detail)

    def _miss(self, flight: Flight) -> None:
        self._end(flight, flight.missed())

    def _end(self, flight: Flight, result: AcquiredChunk) -> None:
        if self._flights.get(flight.chunk.key) is flight:
            del self._flights[flight.chunk.key]
        if not flight.landed.done():
            flight.landed.set_result(result)

    def _is_live(self, lease_id: LeaseId) -> bool:
        lease = self._store.ledger.leases.get(lease_id)
        return lease is not None and lease.expires_ns > self._store.clock_ns()

    async def _give_back(self, node: NodeId, lease_id: LeaseId) -> None:
        try:
            await self._peers.release(node, lease_id, _RELEASE_TIMEOUT_S)
        except BusError as error:
            self._log.info("a peer's lease is left to expire", node=node, lease_id=lease_id, error=str(error))
