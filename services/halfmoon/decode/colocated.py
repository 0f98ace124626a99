"""The colocated role: prompts are computed on the worker that decodes them, through the same pool."""

from collections.abc import Sequence

import structlog

from halfmoon.bus import endpoint
from halfmoon.bus.errors import BusError
from halfmoon.bus.protocol import Bus
from halfmoon.chunks.plan import PlannedChunk
from halfmoon.schemas import subjects
from halfmoon.schemas.kv_tier import ChunkSource
from halfmoon.schemas.registry import LookedUp, Lookup
from halfmoon.schemas.splits import DecodeHalf, ReadyChunk
from halfmoon.worker.leases import LeaseSet
from halfmoon.worker.prompt import Computed, PromptComputer, PromptJob
from halfmoon.worker.sequences import OpenSequence

LOOKUP_TIMEOUT_S = 1.0
MAX_LOOKUP_KEYS = 1024


class Colocated:
    """Finds what is cached by asking the registry, since no conductor placed the prompt by its chunks."""

    def __init__(self, bus: Bus, computer: PromptComputer, log: structlog.stdlib.BoundLogger) -> None:
        self._bus = bus
        self._computer = computer
        self._log = log

    async def compute(
        self, half: DecodeHalf, chunks: Sequence[PlannedChunk], sequence: OpenSequence, leases: LeaseSet
    ) -> Computed:
        """The prompt's KV in the sequence, new chunks registered; as far as it came, where the pool has no room."""
        shared = [chunk for chunk in chunks if chunk.shared]
        job = PromptJob(
            request_id=half.request_id,
            model=half.model,
            tenant=half.tenant,
            chunks=shared,
            reuse=await self._sources(shared),
        )
        hits = await self._computer.acquire(job, leases)
        return await self._computer.compute(job, hits, sequence, leases, self._on_ready)

    async def _sources(self, chunks: Sequence[PlannedChunk]) -> list[tuple[ChunkSource, ...]]:
        """For each chunk of the cached prefix, who has it. Without a registry: this node may still have it itself."""
        anywhere: list[tuple[ChunkSource, ...]] = [() for _ in chunks]
        if not chunks:
            return anywhere
        keys = tuple(chunk.key for chunk in chunks[:MAX_LOOKUP_KEYS])
        try:
            found = await endpoint.call(
                self._bus, subjects.registry("lookup"), Lookup(keys=keys), LookedUp, timeout_s=LOOKUP_TIMEOUT_S
            )
        except BusError as error:
            self._log.warning("registry not asked for cached chunks", error=str(error))
            return anywhere
        for place, placements in enumerate(found.placements[: len(chunks)]):
            anywhere[place] = tuple(ChunkSource(node=each.node, epoch=each.epoch) for each in placements)
        return anywhere

    async def _on_ready(self, chunks: Sequence[ReadyChunk]) -> None:
        """Nobody waits for them: the sequence has them already."""
