"""One request's hand-over, read off its spans in a system's trace store."""

from collections.abc import Sequence
from dataclasses import dataclass

from halfmoon.schemas.chunks import ChunkOutcome
from halfmoon.tracing import attributes, names
from halfmoon.tracing.record import SpanRecord
from halfmoon.tracing.store import TraceStore
from support.system import System
from support.wait import until_blocking

_READ = (ChunkOutcome.HIT_LOCAL, ChunkOutcome.HIT_REMOTE)


@dataclass(frozen=True, slots=True)
class Handover:
    """Unix times."""

    computed_ns: int
    """When prefill had computed the last chunk."""
    read_ns: dict[int, int]
    """When decode could read each chunk, by number."""
    waited_ns: int
    """When decode had all KV."""

    @property
    def late_chunks(self) -> list[int]:
        """Those that decode got only after prefill had ended."""
        return sorted(index for index, at_ns in self.read_ns.items() if at_ns > self.computed_ns)


def handover_of(system: System, request_id: str) -> Handover:
    """Waits until both workers have told everything."""
    wanted = {names.PREFILL_COMPUTE, names.PREFILL_REQUEST, names.DECODE_WAIT_KV, names.DECODE_REQUEST}
    until_blocking(lambda: {span.name for span in _spans(system, request_id)} >= wanted, 20, what="all spans")
    spans = _spans(system, request_id)
    [compute] = [span for span in spans if span.name == names.PREFILL_COMPUTE]
    [wait] = [span for span in spans if span.name == names.DECODE_WAIT_KV]
    read = [span for span in spans if span.name == names.CHUNK and span.parent_span_id == wait.span_id]
    assert all(span.attributes[attributes.CHUNK_OUTCOME] in _READ for span in read)
    return Handover(
        computed_ns=compute.end_ns,
        read_ns={int(str(span.attributes[attributes.CHUNK_INDEX])): span.end_ns for span in read},
        waited_ns=wait.end_ns,
    )


def _spans(system: System, request_id: str) -> Sequence[SpanRecord]:
    with TraceStore(system.data_dir / "traces.db") as store:
        return store.spans_of_request(request_id)
