"""What becomes of chunks: for each change a trace of its own, linked to that of the request that made the chunk."""

from collections.abc import Callable, Mapping

from halfmoon.schemas.chunks import ChunkMeta, EvictReason
from halfmoon.tracing import Context, Tracer, attributes, link_to, names

_NOTHING: Mapping[str, attributes.AttributeValue] = {}


class Fates:
    """`traceparent`, throughout, is the trace context of the chunk's commit."""

    def __init__(self, tracer: Tracer, clock_ns: Callable[[], int]) -> None:
        self._tracer = tracer
        self._clock_ns = clock_ns

    def promoted(self, meta: ChunkMeta, traceparent: str | None) -> None:
        """DRAM keeps a chunk of the SSD from now on."""
        self._trace(names.KVTIER_PROMOTE, meta, traceparent)

    def demoted(self, meta: ChunkMeta, traceparent: str | None, started_ns: int | None) -> None:
        """It lies on the SSD only. `started_ns`: when its file began to be written; None where it was there already."""
        self._trace(names.KVTIER_DEMOTE, meta, traceparent, started_ns=started_ns)

    def evicted(self, meta: ChunkMeta, traceparent: str | None, reason: EvictReason, *, is_surplus: bool) -> None:
        """It is gone from the node."""
        why = {"halfmoon.evict.reason": reason.value, "halfmoon.evict.is_surplus": is_surplus}
        self._trace(names.KVTIER_EVICT, meta, traceparent, why)

    def _trace(
        self,
        name: str,
        meta: ChunkMeta,
        traceparent: str | None,
        extra: Mapping[str, attributes.AttributeValue] = _NOTHING,
        *,
        started_ns: int | None = None,
    ) -> None:
        now_ns = self._clock_ns()
        facts = attributes.ChunkFacts(
            request_id=meta.request_id,
            key=meta.key,
            index=meta.index,
            tier=meta.tier,
            num_bytes=meta.num_bytes,
            num_tokens=meta.num_tokens,
        )
        self._tracer.record_span(
            name,
            now_ns if started_ns is None else started_ns,
            now_ns,
            parent=Context(),
            attributes={**facts.attributes(), **extra},
            links=link_to(traceparent),
        )
