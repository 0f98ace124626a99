"""A prompt's KV: what is cached is acquired, what is missing is computed and committed, each chunk told as it is ready.

    chunks:   [0 … hits)         [hits … slots)              [slots … all)
              acquired, leased   reserved, computed,         no room in the pool:
              told at once       committed, told one by one  left to decode

Used by the prefill service, and by a colocated worker before it decodes in the same sequence.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from halfmoon.bus.errors import BusError, RemoteError
from halfmoon.chunks.checksum import checksum
from halfmoon.chunks.plan import PlannedChunk
from halfmoon.engine.contract import ChunkSink, ChunkWritten, LoadFailed
from halfmoon.schemas.chunks import ChunkMeta, ChunkOutcome
from halfmoon.schemas.ids import LeaseId, ModelName, RequestId, TenantId
from halfmoon.schemas.kv_tier import ChunkSource, NewChunk, SlotRef, WantedChunk, WrittenChunk
from halfmoon.schemas.splits import ReadyChunk
from halfmoon.schemas.wire import Error, ErrorCode
from halfmoon.tasks import batches
from halfmoon.tracing import Tracer
from halfmoon.tracing.names import PREFILL_ACQUIRE, PREFILL_COMPUTE
from halfmoon.worker.chunk_records import ChunkRecorder
from halfmoon.worker.leases import LeaseSet
from halfmoon.worker.reading import Reading, read_chunk
from halfmoon.worker.sequences import OpenSequence

OnReady = Callable[[Sequence[ReadyChunk]], Awaitable[None]]
"""Told of chunks that others can read from now on, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptJob:
    """One prompt, cut into chunks; `reuse` holds, for chunk 0, 1, …, the nodes that have it."""

    request_id: RequestId
    model: ModelName
    tenant: TenantId
    chunks: Sequence[PlannedChunk]
    reuse: Sequence[tuple[ChunkSource, ...]]

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that the chunks cover."""
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Hits:
    """The cached prefix, leased and verified."""

    readings: tuple[Reading, ...] = ()

    @property
    def num_chunks(self) -> int:
        return len(self.readings)

    @property
    def num_tokens(self) -> int:
        return sum(reading.chunk.num_tokens for reading in self.readings)

    def ready(self) -> list[ReadyChunk]:
        return [_ready(reading.chunk, reading.outcome) for reading in self.readings]


@dataclass(frozen=True, slots=True)
class Computed:
    """How far the computation came: positions `[0, num_tokens)` are in the sequence, `num_new` of them computed."""

    num_tokens: int
    num_new: int
    """Neither from the pool nor from the engine's prefix cache."""
    error: Error | None = None
    """Why it ended before the last chunk."""


@dataclass(frozen=True, slots=True)
class _Slots:
    """Reserved places, by chunk index, for the first of the missing chunks."""

    lease_id: LeaseId
    places: dict[int, tuple[PlannedChunk, SlotRef]]


class PromptComputer:
    """Makes prompts' KV. One per worker; holds nothing between calls."""

    def __init__(self, tracer: Tracer, recorder: ChunkRecorder, log: structlog.stdlib.BoundLogger) -> None:
        self._tracer = tracer
        self._recorder = recorder
        self._log = log

    async def acquire(self, job: PromptJob, leases: LeaseSet) -> Hits:
        """The cached prefix: up to the first chunk that can't be had, or is damaged. A pool that fails is a miss."""
        wanted = [
            _wanted(chunk, sources) for chunk, sources in zip(job.chunks, job.reuse, strict=False) if chunk.shared
        ]
        if not wanted:
            return Hits()
        with self._tracer.span(PREFILL_ACQUIRE):
            asked_ns = time.time_ns()
            try:
                acquired = await leases.acquire(wanted, keep=True)
            except BusError as error:
                self._log.warning("cached chunks not acquired; computing them", error=str(error))
                return Hits()
            hits: list[Reading] = []
            for chunk, found in zip(job.chunks, acquired.chunks, strict=False):
                reading = await read_chunk(leases.pool, chunk, found)
                self._recorder.acquired(
                    job.request_id, chunk, found, reading.outcome, asked_ns=asked_ns, error=reading.detail
                )
                if reading.payload is None:
                    break
                hits.append(reading)
            return Hits(tuple(hits))

    async def compute(
        self, job: PromptJob, hits: Hits, sequence: OpenSequence, leases: LeaseSet, on_ready: OnReady
    ) -> Computed:
        """Load the hits, compute what follows them, and tell of each chunk when it can be read.

        Ends early, with the reason, where the pool has no room or has lost the lease. Raises `EngineError`.
        """
        hits = await self._load(hits, sequence, leases)
        missing = job.chunks[hits.num_chunks :]
        if not missing:
            return Computed(hits.num_tokens, 0)
        with self._tracer.span(PREFILL_COMPUTE):
            try:
                slots = await self._reserve(missing, leases)
            except BusError as error:
                return Computed(hits.num_tokens, 0, _pool_error("the pool took no new chunks", error))
            done = await self._write(job, hits.num_tokens, slots, sequence, leases, on_ready)
        if done.error is None and len(slots.places) < len(missing):
            return Computed(done.num_tokens, done.num_new, _no_room(len(slots.places), len(missing)))
        return done

    async def _load(self, hits: Hits, sequence: OpenSequence, leases: LeaseSet) -> Hits:
        """Those that the engine has now: a slow reader may find that its lease has expired."""
        num_hot = await sequence.hot() if hits.num_chunks else 0
        end = 0
        for place, reading in enumerate(hits.readings):
            end += reading.chunk.num_tokens
            if end <= num_hot:
                continue
            if reading.payload is not None:
                try:
                    await sequence.load(reading.chunk.index, reading.chunk.num_tokens, reading.payload)
                except LoadFailed as error:
                    self._log.warning("cached chunk not loaded; computing it", error=str(error))
                    return Hits(hits.readings[:place])
            if reading.after_use(leases.pool).payload is None:
                return Hits(hits.readings[:place])
        return hits

    async def _reserve(self, missing: Sequence[PlannedChunk], leases: LeaseSet) -> _Slots:
        """Slots for as many of the missing chunks as the pool has room for, from the first on."""
        reserved = await leases.reserve(
            [
                NewChunk(
                    key=chunk.key,
                    index=chunk.index,
                    num_tokens=chunk.num_tokens,
                    num_bytes=chunk.num_bytes,
                    parent=chunk.parent,
                    register=chunk.shared,
                )
                for chunk in missing
            ]
        )
        places: dict[int, tuple[PlannedChunk, SlotRef]] = {}
        for chunk, place in zip(missing, reserved.chunks, strict=False):
            if place.slot is None:
                break
            places[chunk.index] = (chunk, place.slot)
        return _Slots(reserved.lease_id, places)

    async def _write(
        self,
        job: PromptJob,
        start: int,
        slots: _Slots,
        sequence: OpenSequence,
        leases: LeaseSet,
        on_ready: OnReady,
    ) -> Computed:
        """Compute from position `start` as far as there are slots."""
        done = num_new = 0
        if not slots.places:
            return Computed(start, 0)
        sinks = [
            ChunkSink(index, chunk.num_tokens, leases.pool.payload(slot))
            for index, (chunk, slot) in slots.places.items()
        ]
        stop = start + sum(sink.num_tokens for sink in sinks)
        # Chunks that come while others are committed are committed together: computing never waits for the pool.
        async with aclosing(batches(sequence.prefill(start, stop, sinks))) as come:
            async for batch in come:
                chunks = [slots.places[written.index][0] for written in batch]
                try:
                    await self._commit(job, batch, slots, leases)
                except BusError as error:
                    return Computed(start + done, num_new, _pool_error("the pool lost a computed chunk", error))
                ready = []
                for chunk, written in zip(chunks, batch, strict=True):
                    done += chunk.num_tokens
                    num_new += 0 if written.is_hot else chunk.num_tokens
                    ready.append(_ready(chunk, ChunkOutcome.HIT_HBM if written.is_hot else ChunkOutcome.COMPUTED))
                await on_ready(ready)
        return Computed(start + done, num_new)

    async def _commit(self, job: PromptJob, batch: Sequence[ChunkWritten], slots: _Slots, leases: LeaseSet) -> None:
        """Make chunks readable, all with one question. Raises `BusError`."""
        places = [slots.places[written.index] for written in batch]
        payloads = [leases.pool.payload(slot) for _, slot in places]
        digests = await asyncio.to_thread(lambda: [checksum(payload) for payload in payloads])
        commits = []
        for (chunk, slot), written, digest in zip(places, batch, digests, strict=True):
            self._recorder.written(job.request_id, chunk, written)
            commits.append(_written(job, chunk, slot, digest, written))
        shared = [chunk for chunk, _ in places if chunk.shared]
        committed = await leases.commit(slots.lease_id, commits)
        if committed.num_registered < len(shared):
            # Another writer was first with some: readers find its copies, so those are the ones to hold.
            await leases.acquire([_wanted(chunk, ()) for chunk in shared], keep=True)


def _written(job: PromptJob, chunk: PlannedChunk, slot: SlotRef, digest: bytes, written: ChunkWritten) -> WrittenChunk:
    meta = ChunkMeta(
        key=chunk.key,
        index=chunk.index,
        num_tokens=chunk.num_tokens,
        num_bytes=chunk.num_bytes,
        checksum=digest,
        request_id=job.request_id,
        created_ns=written.finished_ns,
        parent=chunk.parent,
        model=job.model,
        tenant=job.tenant,
    )
    return WrittenChunk(slot=slot.slot, generation=slot.generation, meta=meta, register=chunk.shared)


def _wanted(chunk: PlannedChunk, sources: tuple[ChunkSource, ...]) -> WantedChunk:
    return WantedChunk(
        key=chunk.key,
        index=chunk.index,
        num_tokens=chunk.num_tokens,
        num_bytes=chunk.num_bytes,
        sources=sources,
    )


def _ready(chunk: PlannedChunk, outcome: ChunkOutcome) -> ReadyChunk:
    return ReadyChunk(
        key=chunk.key,
        index=chunk.index,
        num_tokens=chunk.num_tokens,
        num_bytes=chunk.num_bytes,
        outcome=outcome,
    )


def _no_room(num_slots: int, num_missing: int) -> Error:
    return Error(code=ErrorCode.NO_SPACE, message=f"the pool had room for {num_slots} of {num_missing} new chunks")


def _pool_error(what: str, error: BusError) -> Error:
    code = error.error.code if isinstance(error, RemoteError) else ErrorCode.UNAVAILABLE
    return Error(code=code, message=f"{what}: {error}")
