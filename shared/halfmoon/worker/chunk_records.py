"""What happened to each chunk at one worker, as spans and counts."""

import time
from collections.abc import Callable

from halfmoon.chunks.plan import PlannedChunk
from halfmoon.engine.contract import ChunkWritten
from halfmoon.schemas.chunks import ChunkOutcome, Tier
from halfmoon.schemas.ids import NodeId, RequestId
from halfmoon.schemas.kv_tier import AcquiredChunk
from halfmoon.tracing import Tracer
from halfmoon.tracing.attributes import ChunkFacts
from halfmoon.tracing.names import CHUNK

CountChunk = Callable[[ChunkOutcome, int], None]
"""Told the outcome and the bytes that moved."""


class ChunkRecorder:
    """Records each chunk as a span under the current one, with its real times, and counts it."""

    def __init__(self, tracer: Tracer, node: NodeId, count: CountChunk) -> None:
        self._tracer = tracer
        self._node = node
        self._count = count

    def acquired(
        self,
        request_id: RequestId,
        chunk: PlannedChunk,
        found: AcquiredChunk,
        outcome: ChunkOutcome,
        *,
        asked_ns: int,
        error: str = "",
    ) -> None:
        """`outcome` may be worse than `found.outcome`: what came may be corrupt. `asked_ns`: when it was asked for."""
        moved = found.transport is not None and found.finished_ns > 0
        start_ns = found.started_ns or asked_ns
        end_ns = found.finished_ns or time.time_ns()
        facts = ChunkFacts(
            request_id=request_id,
            key=chunk.key,
            index=chunk.index,
            outcome=outcome,
            tier=found.meta.tier.value if found.meta is not None else None,
            num_bytes=chunk.num_bytes,
            num_tokens=chunk.num_tokens,
            source=found.source,
            destination=self._node,
            transport=found.transport,
            queue_wait_ms=(found.transfer_started_ns - found.started_ns) / 1e6 if moved else None,
            transfer_ms=(found.finished_ns - found.transfer_started_ns) / 1e6 if moved else None,
            in_place=(found.slot is not None and found.slot.arena is not None) or None,
        )
        self._tracer.record_span(
            CHUNK, start_ns, end_ns, attributes=facts.attributes(), error=ChunkUnusable(error) if error else None
        )
        self._count(outcome, found.num_bytes_moved)

    def written(self, request_id: RequestId, chunk: PlannedChunk, written: ChunkWritten) -> None:
        """By the engine, into the pool: computed, or copied where it was hot."""
        outcome = ChunkOutcome.HIT_HBM if written.is_hot else ChunkOutcome.COMPUTED
        self._own(request_id, chunk, outcome, written.started_ns, written.finished_ns)

    def hot(self, request_id: RequestId, chunk: PlannedChunk) -> None:
        """The engine has it: it isn't read from any pool."""
        now_ns = time.time_ns()
        self._own(request_id, chunk, ChunkOutcome.HIT_HBM, now_ns, now_ns)

    def _own(
        self, request_id: RequestId, chunk: PlannedChunk, outcome: ChunkOutcome, started_ns: int, finished_ns: int
    ) -> None:
        facts = ChunkFacts(
            request_id=request_id,
            key=chunk.key,
            index=chunk.index,
            outcome=outcome,
            tier=Tier.HBM.value if outcome is ChunkOutcome.HIT_HBM else None,
            num_bytes=chunk.num_bytes,
            num_tokens=chunk.num_tokens,
            source=self._node,
            destination=self._node,
        )
        self._tracer.record_span(CHUNK, started_ns, finished_ns, attributes=facts.attributes())
        self._count(outcome, 0)


class ChunkUnusable(Exception):
    """Why a chunk could not be used; for the span's status."""
