"""Reading acquired chunks out of the arena, and judging whether they may be used."""

import asyncio
from dataclasses import dataclass

from halfmoon.chunks.checksum import checksum
from halfmoon.chunks.plan import PlannedChunk
from halfmoon.pool.arena import ArenaError
from halfmoon.pool.client import PoolClient
from halfmoon.schemas.chunks import ChunkOutcome
from halfmoon.schemas.kv_tier import AcquiredChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One chunk as it was found. `payload` is None where it can't be used; `detail` then says why."""

    chunk: PlannedChunk
    found: AcquiredChunk
    outcome: ChunkOutcome
    payload: memoryview | None
    detail: str = ""

    def unusable(self, detail: str) -> "Reading":
        """The same as a miss: it is there, but the engine could not take it."""
        return Reading(chunk=self.chunk, found=self.found, outcome=ChunkOutcome.MISS, payload=None, detail=detail)

    def after_use(self, pool: PoolClient) -> "Reading":
        """The same, or a miss where the slot was freed meanwhile, so that other bytes may have been read."""
        if self.found.slot is None or self.payload is None or pool.holds(self.found.slot):
            return self
        return _expired(self.chunk, self.found)


async def read_chunk(pool: PoolClient, chunk: PlannedChunk, found: AcquiredChunk) -> Reading:
    """The chunk's payload, in place, after its checksum was verified. It is valid while the lease is held."""
    if found.slot is None:
        detail = found.detail or "no node could provide it"
        return Reading(chunk=chunk, found=found, outcome=found.outcome, payload=None, detail=detail)
    if found.slot.num_bytes != chunk.num_bytes or found.key != chunk.key:
        detail = f"the pool gave {found.slot.num_bytes} bytes where {chunk.num_bytes} belong"
        return Reading(chunk=chunk, found=found, outcome=ChunkOutcome.CORRUPT, payload=None, detail=detail)
    try:
        payload = pool.payload(found.slot)
    except ArenaError:
        return _expired(chunk, found)
    expected = found.meta.checksum if found.meta is not None else found.slot.checksum
    if await asyncio.to_thread(checksum, payload) != expected:
        if not pool.holds(found.slot):
            return _expired(chunk, found)
        await pool.report(chunk.key, found.slot)
        detail = "its checksum does not match"
        return Reading(chunk=chunk, found=found, outcome=ChunkOutcome.CORRUPT, payload=None, detail=detail)
    return Reading(chunk=chunk, found=found, outcome=found.outcome, payload=payload)


def _expired(chunk: PlannedChunk, found: AcquiredChunk) -> Reading:
    detail = "its lease expired while it was read"
    return Reading(chunk=chunk, found=found, outcome=ChunkOutcome.EXPIRED, payload=None, detail=detail)
