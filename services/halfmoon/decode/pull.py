"""Announced chunks into the engine: pulled through this node's pool, verified, loaded, let go."""

import time
from collections.abc import Sequence

from halfmoon.bus.errors import BusError
from halfmoon.chunks.plan import PlannedChunk
from halfmoon.engine.contract import LoadFailed
from halfmoon.schemas.ids import RequestId
from halfmoon.schemas.kv_tier import ChunkSource, WantedChunk
from halfmoon.worker.chunk_records import ChunkRecorder
from halfmoon.worker.leases import LeaseSet
from halfmoon.worker.reading import read_chunk
from halfmoon.worker.sequences import OpenSequence

MAX_BATCH_CHUNKS = 16
"""Per acquire: what came first is loaded while the next batch waits."""


class ChunkPuller:
    """Loads runs of chunks. Each is in the engine, or it could not be had: nothing in between."""

    def __init__(self, recorder: ChunkRecorder) -> None:
        self._recorder = recorder

    def skip(self, request_id: RequestId, chunks: Sequence[PlannedChunk]) -> None:
        """Record that the engine has these already."""
        for chunk in chunks:
            self._recorder.hot(request_id, chunk)

    async def pull(
        self,
        request_id: RequestId,
        run: Sequence[tuple[PlannedChunk, ChunkSource]],
        sequence: OpenSequence,
        leases: LeaseSet,
    ) -> tuple[int, str | None]:
        """How many of the run were loaded, from the first on; and why the next one was not.

        Takes at most `MAX_BATCH_CHUNKS` of the run. Where it is interrupted, the lease stays with `leases`, since the
        engine may still read: whoever closes the sequence releases it afterwards.
        """
        run = run[:MAX_BATCH_CHUNKS]
        wanted = [
            WantedChunk(
                key=chunk.key,
                index=chunk.index,
                num_tokens=chunk.num_tokens,
                num_bytes=chunk.num_bytes,
                sources=(source,),
            )
            for chunk, source in run
        ]
        asked_ns = time.time_ns()
        try:
            # What is pulled for decode is its working copy: prefill's node keeps the chunk, this one frees it.
            acquired = await leases.acquire(wanted, keep=False)
        except BusError as error:
            return 0, f"this node's pool can't be asked: {error}"
        num_loaded = 0
        lost: str | None = None
        for (chunk, _), found in zip(run, acquired.chunks, strict=False):
            reading = await read_chunk(leases.pool, chunk, found)
            if reading.payload is not None:
                try:
                    await sequence.load(chunk.index, chunk.num_tokens, reading.payload)
                except LoadFailed as error:
                    reading = reading.unusable(str(error))
                else:
                    reading = reading.after_use(leases.pool)
            self._recorder.acquired(request_id, chunk, found, reading.outcome, asked_ns=asked_ns, error=reading.detail)
            if reading.payload is None:
                # Behind others it gets a second chance, by itself: the pool may have had no room for all at once.
                if num_loaded == 0:
                    lost = f"chunk {chunk.index} ({reading.outcome}): {reading.detail}"
                break
            num_loaded += 1
        await leases.release(acquired.lease_id)
        return num_loaded, lost
