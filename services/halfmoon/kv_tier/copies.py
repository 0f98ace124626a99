"""Bringing chunks here that no request waits for: replicas, and what is likely to be asked for soon.

Requests come first. A batch begins only while no pull for a request waits for its turn, it is small, and one is on its
way at a time; what can't begin for some seconds is given up. What comes takes free slots, else those of the chunks that
are worth least here, and of all slots no more than a share holds chunks that were brought and have not been used.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from opentelemetry.trace import Link

from halfmoon.bus.endpoint import Envelope
from halfmoon.bus.errors import RemoteError
from halfmoon.chunks.keys import KEY_BYTES
from halfmoon.kv_tier.flights import PullRequest
from halfmoon.kv_tier.pull import Puller
from halfmoon.kv_tier.ssd.reads import SsdReader
from halfmoon.kv_tier.store import ChunkStore
from halfmoon.schemas.copies import Cause, Replicate, Replicating
from halfmoon.schemas.ids import ChunkKey, NodeId, RequestId, WorkerId, new_lease_id
from halfmoon.schemas.kv_tier import AcquiredChunk, WantedChunk
from halfmoon.schemas.wire import Error, ErrorCode
from halfmoon.tracing import Context, Tracer, attributes, current, link_to, names, traceparent

MAX_QUEUED = 4096
"""Chunks in line."""
MAX_ORDER = 1024
_LOOK_S = 0.02
_BATCH_S = 10.0
"""A batch that takes longer is given up."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    chunk: WantedChunk
    cause: Cause
    links: tuple[Link, ...]
    """To the request on whose account it was ordered, if it was one."""
    until_s: float


class Copier:
    """Owns what is in line. `run` is its one task, cancelled by its owner."""

    def __init__(
        self,
        store: ChunkStore,
        puller: Puller,
        tracer: Tracer,
        log: structlog.stdlib.BoundLogger,
        *,
        node: NodeId,
        holder: WorkerId,
        batch_bytes: int,
        max_share: float,
        give_up_s: float,
        reader: SsdReader | None = None,
    ) -> None:
        """`batch_bytes` are on their way at once, one chunk at the least. `max_share`: of the slots, for what was
        brought and nobody has used."""
        self._store = store
        self._puller = puller
        self._tracer = tracer
        self._log = log
        self._node = node
        self._holder = holder
        self._batch_bytes = batch_bytes
        self._max_unused = math.ceil(max_share * store.arena.num_slots)
        self._give_up_s = give_up_s
        self._reader = reader
        self._queue: deque[_Wanted] = deque()
        self._queued: set[ChunkKey] = set()
        self._news = asyncio.Event()
        self._num_batches = 0
        self.num_given_up = 0
        """Chunks for which there was no time or room."""
        self.num_failed = 0
        """Chunks that none of their sources could give."""

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    async def replicate(self, request: Replicate, envelope: Envelope) -> Replicating:
        """Take an order. Raises `RemoteError` where it makes no sense."""
        if len(request.chunks) > MAX_ORDER or any(len(chunk.key) != KEY_BYTES for chunk in request.chunks):
            message = f"at most {MAX_ORDER} chunks, with keys of {KEY_BYTES} bytes"
            raise RemoteError(Error(code=ErrorCode.INVALID_REQUEST, message=message))
        links = link_to(traceparent(envelope.context))
        until_s = time.monotonic() + self._give_up_s
        num_here = num_queued = 0
        for chunk in request.chunks:
            if self._is_here(chunk.key) or chunk.key in self._queued or self._puller.is_coming(chunk.key):
                num_here += 1
            elif self._room(request.cause) > len(self._queued) and len(self._queued) < MAX_QUEUED:
                self._queue.append(_Wanted(chunk, request.cause, links, until_s))
                self._queued.add(chunk.key)
                num_queued += 1
            else:
                # Without this one, those after it are of no use.
                break
        self._news.set()
        return Replicating(num_here=num_here, num_queued=num_queued)

    async def run(self) -> None:
        """Never returns."""
        while True:
            if not self._queue:
                self._news.clear()
                await self._news.wait()
                continue
            if self._puller.has_line and time.monotonic() < self._queue[0].until_s:
                await asyncio.sleep(_LOOK_S)
                continue
            if batch := self._next_batch():
                await self._bring(batch)

    def _next_batch(self) -> list[_Wanted]:
        """Chunks of one order, as many as may be on their way at once; those whose time is over are dropped."""
        batch: list[_Wanted] = []
        left_bytes = self._batch_bytes
        room = self._room(self._queue[0].cause)
        while self._queue and (not batch or self._queue[0].until_s == batch[0].until_s):
            wanted = self._queue[0]
            if batch and (wanted.chunk.num_bytes > left_bytes or len(batch) >= room):
                break
            self._queue.popleft()
            self._queued.discard(wanted.chunk.key)
            if time.monotonic() >= wanted.until_s or room <= 0:
                self.num_given_up += 1
            elif not self._is_here(wanted.chunk.key) and not self._puller.is_coming(wanted.chunk.key):
                batch.append(wanted)
                left_bytes -= wanted.chunk.num_bytes
        return batch

    async def _bring(self, batch: Sequence[_Wanted]) -> None:
        self._num_batches += 1
        request_id = RequestId(f"{batch[0].cause.value}-{self._node}-{self._num_batches}")
        facts: dict[str, attributes.AttributeValue] = {
            attributes.NODE: self._node,
            "halfmoon.num_chunks": len(batch),
            "halfmoon.replicate.cause": batch[0].cause.value,
        }
        lease_id = new_lease_id()
        ledger = self._store.ledger
        with self._tracer.span(
            names.KVTIER_REPLICATE, parent=Context(), attributes=facts, links=batch[0].links
        ) as span:
            ends_ns = time.time_ns() + int(_BATCH_S * 1e9)
            ledger.open_lease(lease_id, self._holder, request_id, self._store.clock_ns() + int(2 * _BATCH_S * 1e9))
            try:
                pull = PullRequest(request_id, lease_id, True, ends_ns, current(), unasked=True)
                brought = await self._fetch(pull, [wanted.chunk for wanted in batch])
            finally:
                ledger.release(lease_id, self._store.clock_ns())
            self._account(batch, brought)
            span.set_attribute("halfmoon.num_brought", sum(chunk.slot is not None for chunk in brought))

    async def _fetch(self, pull: PullRequest, chunks: Sequence[WantedChunk]) -> list[AcquiredChunk]:
        """From this node's own SSD what lies there, to stay in DRAM; from other nodes the rest."""
        lower = self._store.lower
        below = {} if lower is None or self._reader is None else lower.among(chunk.key for chunk in chunks)
        if self._reader is None or not below:
            return await self._puller.pull(pull, chunks)
        here = [chunk for chunk in chunks if chunk.key in below]
        elsewhere = [chunk for chunk in chunks if chunk.key not in below]
        read, pulled = await asyncio.gather(
            self._reader.read(pull, here, direct=True), self._puller.pull(pull, elsewhere)
        )
        for chunk in read:
            if chunk.slot is not None:
                self._store.promote(self._store.ledger.slots[chunk.slot.slot], pull.request_id)
        by_key = {chunk.key: chunk for chunk in (*read, *pulled)}
        return [by_key[chunk.key] for chunk in chunks]

    def _account(self, batch: Sequence[_Wanted], brought: Sequence[AcquiredChunk]) -> None:
        for wanted, chunk in zip(batch, brought, strict=True):
            if self._is_here(chunk.key):
                self._store.unasked.bring(chunk.key, wanted.cause)
            elif chunk.slot is None:
                self.num_failed += 1
        misses = [chunk.detail for chunk in brought if chunk.slot is None]
        if misses:
            self._log.info("copies could not be made", cause=batch[0].cause, count=len(misses), why=misses[0])

    def _is_here(self, key: ChunkKey) -> bool:
        slot = self._store.ledger.slots.find(key)
        return slot is not None and slot.registered

    def _room(self, cause: Cause) -> int:
        """Chunks that may come: of the slots that are free or could be freed, and of the share for what isn't used.

        Pinned ones aren't kept for their use, and have a bound of their own: see `pins`.
        """
        counts, unasked = self._store.ledger.slots.counts(), self._store.unasked
        could_be_freed = counts.free + counts.ready
        if cause is Cause.PINNED:
            return could_be_freed
        return min(self._max_unused - len(unasked) + unasked.num_waiting(Cause.PINNED), could_be_freed)
