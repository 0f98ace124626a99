"""Reading chunks from the SSD into slots for those who asked: one read per chunk, however many wait for it.

    1st use   read into a slot that only its readers' leases hold; freed with the last of them
    2nd use   within the reach of DRAM: the copy in the slot is registered, so it stays (promotion)
    direct    for another pool, which will have its own copy: as a first use, every time

What can't be read is reported as a miss, and the caller looks elsewhere. Every wait is bounded by the deadline of the
acquire, and by how long a disk may keep silent.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import structlog

from halfmoon.kv_tier.flights import PullRequest
from halfmoon.kv_tier.flow import Flow
from halfmoon.kv_tier.ledger import LeaseGone, Misfit
from halfmoon.kv_tier.slot import Slot
from halfmoon.kv_tier.ssd.lower_tier import LowerTier
from halfmoon.kv_tier.ssd.store import NotRead
from halfmoon.kv_tier.store import ChunkStore
from halfmoon.schemas.chunks import ChunkMeta, ChunkOutcome, Tier
from halfmoon.schemas.ids import ChunkKey, NodeId, WorkerId, new_lease_id
from halfmoon.schemas.kv_tier import AcquiredChunk, WantedChunk, WrittenChunk
from halfmoon.schemas.measurements import PullSample
from halfmoon.tasks import ended
from halfmoon.tracing import Tracer, attributes, names

_NEVER_NS = 2**62
_LOOK_S = 0.25


@dataclass(slots=True)
class _Read:
    """One chunk on its way from the SSD."""

    chunk: WantedChunk
    request: PullRequest
    """That began it."""
    waiting: list[PullRequest]
    counts_as_use: bool
    started_ns: int
    landed: "asyncio.Future[AcquiredChunk]" = field(default_factory=asyncio.Future)


class SsdReader:
    """Owns every read. `close` waits until no thread writes into a slot any more."""

    def __init__(
        self,
        store: ChunkStore,
        lower: LowerTier,
        tracer: Tracer,
        log: structlog.stdlib.BoundLogger,
        *,
        node: NodeId,
        holder: WorkerId,
    ) -> None:
        self._store = store
        self._lower = lower
        self._ssd = lower.ssd
        self._tracer = tracer
        self._log = log
        self._node = node
        self._holder = holder
        self._reads: dict[ChunkKey, _Read] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.flow: Flow | None = None
        """Told how long reads took, once there is one."""

    async def read(self, request: PullRequest, chunks: Sequence[WantedChunk], *, direct: bool) -> list[AcquiredChunk]:
        """Bring these chunks into slots, leased to the request's lease. Raises nothing but `CancelledError`."""
        self._make_room(chunk.key for chunk in chunks if chunk.key not in self._reads)
        reads = [self._join(request, chunk, direct=direct) for chunk in chunks]
        return [await self._arrival(request, read) for read in reads]

    async def close(self) -> None:
        await ended(*self._tasks)

    def _make_room(self, keys: Iterable[ChunkKey]) -> None:
        """At whose cost it comes depends on whose the chunks are: as where new ones are reserved."""
        num_slots = 0
        found = (self._ssd.find(key) for key in keys)
        for tenant, count in Counter(chunk.meta.tenant for chunk in found if chunk is not None).items():
            num_slots += count
            self._store.make_room(num_slots, tenant)

    def _join(self, request: PullRequest, chunk: WantedChunk, *, direct: bool) -> _Read:
        read = self._reads.get(chunk.key)
        if read is None:
            read = self._reads[chunk.key] = _Read(chunk, request, [request], not direct, time.time_ns())
            task = asyncio.get_running_loop().create_task(self._fly(read))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return read
        read.waiting.append(request)
        if not direct and read.counts_as_use and request.request_id != read.request.request_id:
            self._lower.note_read(chunk.key, request.request_id)
        read.counts_as_use = read.counts_as_use or not direct
        return read

    async def _arrival(self, request: PullRequest, read: _Read) -> AcquiredChunk:
        """The read's end, as this request sees it: a miss at its deadline, or when the disk was silent for too long."""
        while not read.landed.done():
            left_s = (request.deadline_ns - time.time_ns()) / 1e9
            if left_s <= 0:
                return self._miss(read, "the deadline came before the SSD's answer")
            if (why := self._ssd.unreadable()) is not None:
                return self._miss(read, why)
            await asyncio.wait([read.landed], timeout=min(left_s, _LOOK_S))
        result = read.landed.result()
        if result.slot is None:
            return result
        lease = self._store.ledger.leases.get(request.lease_id)
        if lease is None or lease.slots.get(result.slot.slot) != result.slot.generation:
            return self._miss(read, "the lease it was read for has expired", ChunkOutcome.EXPIRED)
        return result

    async def _fly(self, read: _Read) -> None:
        result = self._miss(read, "the read was cancelled")
        try:
            result = await self._fetch(read)
        except NotRead as error:
            result = self._miss(read, str(error), ChunkOutcome.CORRUPT if error.is_damaged else ChunkOutcome.MISS)
        except (LeaseGone, Misfit) as error:
            result = self._miss(read, str(error))
        except Exception as error:
            # A defect here: those who wait must not wait for their deadlines.
            self._log.error("a read from the SSD failed", exc_info=error)
            result = self._miss(read, type(error).__name__)
        finally:
            del self._reads[read.chunk.key]
            read.landed.set_result(result)

    async def _fetch(self, read: _Read) -> AcquiredChunk:
        key, request = read.chunk.key, read.request
        found = self._ssd.find(key)
        if found is None:
            raise NotRead("it isn't on the SSD any more")
        own_lease = new_lease_id()
        self._store.ledger.open_lease(own_lease, self._holder, request.request_id, _NEVER_NS)
        try:
            slot = self._store.reserve(own_lease, key, found.meta.num_bytes, found.meta.tenant)
            if slot is None:
                raise NotRead("this pool has no room: every slot is in use, or reserved for other tenants")
            generation = slot.generation
            started_ns = time.time_ns()
            body = await self._ssd.read(key, self._store.padded(slot))
            finished_ns = time.time_ns()
            self._measured(read, finished_ns - started_ns)
            if self._store.is_stale(body.meta, request.request_id):
                raise NotRead("it was flushed")
            is_second = read.counts_as_use and self._lower.note_read(key, request.request_id)
            now_ns = self._store.clock_ns()
            meta = msgspec.structs.replace(body.meta, tier=Tier.DRAM, hits=0, last_access_ns=now_ns)
            written = WrittenChunk(slot=slot.number, generation=generation, meta=meta, register=is_second)
            if self._store.commit(own_lease, [written], body.traceparent):
                self._store.promoted(slot)
            for waiting in read.waiting:
                lease = self._store.ledger.leases.get(waiting.lease_id)
                if lease is not None and lease.expires_ns > now_ns:
                    self._store.ledger.share(lease, slot, now_ns)
            self._trace(read, meta, started_ns, finished_ns)
            return self._answer(read, slot, meta, started_ns, finished_ns)
        finally:
            self._store.ledger.release(own_lease, self._store.clock_ns())

    def _measured(self, read: _Read, duration_ns: int) -> None:
        """Those that are read at the same time share the disk."""
        if self.flow is not None:
            others = sum(each.chunk.num_bytes for each in self._reads.values() if each is not read)
            self.flow.measured(
                PullSample(
                    source=self._node,
                    num_bytes=read.chunk.num_bytes,
                    duration_s=duration_ns / 1e9,
                    num_bytes_ahead=others,
                )
            )

    def _answer(self, read: _Read, slot: Slot, meta: ChunkMeta, started_ns: int, finished_ns: int) -> AcquiredChunk:
        return AcquiredChunk(
            key=read.chunk.key,
            index=read.chunk.index,
            outcome=ChunkOutcome.SSD,
            slot=self._store.reference(slot),
            meta=msgspec.structs.replace(meta, tier=Tier.SSD),
            source=self._node,
            num_bytes_moved=slot.num_bytes,
            started_ns=read.started_ns,
            transfer_started_ns=started_ns,
            finished_ns=finished_ns,
        )

    def _miss(self, read: _Read, detail: str, outcome: ChunkOutcome = ChunkOutcome.MISS) -> AcquiredChunk:
        return AcquiredChunk(
            key=read.chunk.key,
            index=read.chunk.index,
            outcome=outcome,
            started_ns=read.started_ns,
            finished_ns=time.time_ns(),
            detail=detail,
        )

    def _trace(self, read: _Read, meta: ChunkMeta, started_ns: int, finished_ns: int) -> None:
        facts = attributes.ChunkFacts(
            request_id=read.request.request_id,
            key=meta.key,
            index=read.chunk.index,
            outcome=ChunkOutcome.SSD,
            tier=Tier.SSD,
            num_bytes=meta.num_bytes,
            num_tokens=meta.num_tokens,
            source=self._node,
            destination=self._node,
            queue_wait_ms=(started_ns - read.started_ns) / 1e6,
            transfer_ms=(finished_ns - started_ns) / 1e6,
        )
        self._tracer.record_span(
            names.KVTIER_TRANSFER,
            started_ns,
            finished_ns,
            parent=read.request.context,
            attributes=facts.attributes(),
        )
