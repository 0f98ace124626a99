"""A chunk on its way here, and those who wait for it."""

import asyncio
import time
from dataclasses import dataclass, field

from halfmoon.kv_tier.slot import Slot
from halfmoon.schemas.chunks import ChunkMeta, ChunkOutcome
from halfmoon.schemas.ids import LeaseId, RequestId
from halfmoon.schemas.kv_tier import AcquiredChunk, ChunkSource, WantedChunk
from halfmoon.tracing import Context
from halfmoon.transport.protocol import SliceRead


@dataclass(frozen=True, slots=True)
class PullRequest:
    """What one acquire wants pulled."""

    request_id: RequestId
    lease_id: LeaseId
    keep: bool
    deadline_ns: int
    context: Context
    in_place: bool = False
    """A chunk that isn't kept may stay where it is, if its reader can map that arena."""
    lease_s: float = 10.0
    """Length of the reader's lease: what is lent for it elsewhere is renewed by as much."""
    unasked: bool = False
    """No request waits for it: see `copies`."""

    @property
    def needs_copy(self) -> bool:
        return self.keep or not self.in_place


@dataclass(slots=True)
class Flight:
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

    def missed(self) -> AcquiredChunk:
        """No source is left."""
        return self.missed_as(self.failure, self.detail or "no source is left to ask")

    def missed_as(self, outcome: ChunkOutcome, detail: str) -> AcquiredChunk:
        return AcquiredChunk(
            key=self.chunk.key,
            index=self.chunk.index,
            outcome=outcome,
            started_ns=self.started_ns,
            finished_ns=time.time_ns(),
            detail=detail,
        )


@dataclass(slots=True)
class Arrival:
    """A chunk that is being read into a staged slot."""

    flight: Flight
    slot: Slot
    generation: int
    meta: ChunkMeta
    read: SliceRead
    checksum: bytes
    traceparent: str | None = None
    """Of the request that made the chunk, where its source knows it."""
