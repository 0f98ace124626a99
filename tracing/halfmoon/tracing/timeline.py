"""The life of one request as a waterfall: records in, rows out. Pure, and content with whatever spans there are.

`build` orders the spans of a request into rows, parents before children; `halfmoon.tracing.render` draws them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from halfmoon.schemas.chunks import ChunkOutcome
from halfmoon.tracing import attributes as a
from halfmoon.tracing import names
from halfmoon.tracing.record import SpanRecord

_NS_PER_MS = 1e6

_EXPECTED = (names.GATEWAY_REQUEST, names.CONDUCTOR_SCHEDULE, names.PREFILL_REQUEST, names.DECODE_REQUEST)
_ENVELOPES = frozenset({names.GATEWAY_REQUEST, names.PREFILL_REQUEST, names.DECODE_REQUEST})
_WAITS = frozenset({names.PREFILL_QUEUE, names.DECODE_QUEUE, names.DECODE_WAIT_KV})
_MOVES = frozenset(
    {
        names.PREFILL_ACQUIRE,
        names.KVTIER_ACQUIRE,
        names.KVTIER_TRANSFER,
        names.KVTIER_DEMOTE,
        names.KVTIER_PROMOTE,
        names.KVTIER_EVICT,
    }
)
_PARTS = frozenset({*_EXPECTED, *_WAITS, names.PREFILL_COMPUTE, names.DECODE_GENERATE, names.PREFILL_ACQUIRE})


class RowKind(StrEnum):
    ENVELOPE = "envelope"
    """One service's whole part in the request; its children say what it did."""
    WAIT = "wait"
    MOVE = "move"
    WORK = "work"
    MARK = "mark"
    """A moment: the first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    depth: int
    label: str
    kind: RowKind
    start_ms: float
    """After the first span's start. Clocks of two hosts differ, so a child may seem to begin before its parent."""
    duration_ms: float
    detail: str = ""
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    request_id: str
    trace_ids: tuple[str, ...]
    model: str | None
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    ttft_ms: float | None
    total_ms: float
    rows: tuple[Row, ...]
    outcomes: dict[str, dict[str, int]]
    """Where (`prefill`, `decode`, …) → outcome → number of chunks."""
    later: tuple[Row, ...]
    """What happened to the request's chunks afterwards, in traces of their own. Not on the time axis."""
    not_seen: tuple[str, ...]
    """Spans that a whole request has and this one lacks."""


def build(spans: Iterable[SpanRecord], request_id: str, *, fold_chunks_over: int = 16) -> Waterfall:
    """The waterfall of one request, from all spans of its traces and those that link to them, in any order.

    Where one parent has more than `fold_chunks_over` chunks, runs of neighbours that fared alike share a row.
    Raises `ValueError` when none of the spans belongs to the request.
    """
    unique = {(span.trace_id, span.span_id): span for span in spans}
    every = sorted(unique.values(), key=_order)
    trace_ids = _main_traces(every, request_id)
    main = [span for span in every if span.trace_id in trace_ids]
    if not main:
        raise ValueError(f"no span belongs to request {request_id}; pass the spans that the store finds for it")
    start_ns = min(span.start_ns for span in main)
    end_ns = max(span.end_ns for span in main)
    root = next((span for span in main if span.name == names.GATEWAY_REQUEST), None)
    first_token_ns = _first_token_ns(root)
    tree = _Tree(main, start_ns, first_token_ns, fold_chunks_over)
    later = [span for span in every if span.trace_id not in trace_ids and _concerns(span, request_id, trace_ids)]
    seen = {span.name for span in main}
    return Waterfall(
        request_id=request_id,
        trace_ids=trace_ids,
        model=_first_text(main, a.GEN_AI_REQUEST_MODEL),
        prompt_tokens=_first_int(main, a.GEN_AI_USAGE_INPUT_TOKENS),
        cached_tokens=_first_int(main, a.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS),
        completion_tokens=_first_int(main, a.GEN_AI_USAGE_OUTPUT_TOKENS),
        ttft_ms=_ttft_ms(main, root, first_token_ns),
        total_ms=(end_ns - start_ns) / _NS_PER_MS,
        rows=tuple(tree.rows()),
        outcomes=tree.outcomes(),
        later=tuple(_row(span, 0, _later_label(span), start_ns) for span in later),
        not_seen=tuple(name for name in _EXPECTED if name not in seen),
    )


class _Tree:
    """The main spans by parent. A span whose parent is not among them stands at the top."""

    def __init__(
        self, spans: Sequence[SpanRecord], start_ns: int, first_token_ns: int | None, fold_chunks_over: int
    ) -> None:
        self._start_ns = start_ns
        self._first_token_ns = first_token_ns
        self._fold_chunks_over = fold_chunks_over
        self._by_id = {span.span_id: span for span in spans}
        self._children: dict[str | None, list[SpanRecord]] = {}
        for span in spans:
            parent = span.parent_span_id if span.parent_span_id in self._by_id else None
            self._children.setdefault(parent, []).append(span)

    def rows(self, parent: SpanRecord | None = None, depth: int = 0) -> Iterator[Row]:
        children = self._children.get(parent.span_id if parent is not None else None, [])
        if parent is not None and parent.name == names.GATEWAY_REQUEST and self._first_token_ns is not None:
            at_ms = (self._first_token_ns - self._start_ns) / _NS_PER_MS
            yield Row(depth=depth, label="first token", kind=RowKind.MARK, start_ms=at_ms, duration_ms=0.0)
        for run in self._runs(children):
            if len(run) > 1:
                yield _folded_row(run, depth, self._start_ns)
                continue
            (span,) = run
            yield _row(span, depth, _label(span, parent), self._start_ns)
            yield from self.rows(span, depth + 1)

    def outcomes(self) -> dict[str, dict[str, int]]:
        counts: dict[str, Counter[str]] = {}
        for span in self._by_id.values():
            outcome = span.attributes.get(a.CHUNK_OUTCOME)
            if span.name == names.CHUNK and isinstance(outcome, str):
                counts.setdefault(self._side(span), Counter())[outcome] += 1
        order = [str(outcome) for outcome in ChunkOutcome]
        return {
            side: {outcome: counted[outcome] for outcome in order if counted[outcome]}
            for side, counted in sorted(counts.items(), key=lambda item: (item[0] != "prefill", item[0]))
        }

    def _side(self, span: SpanRecord) -> str:
        """`prefill` or `decode`, from the nearest ancestor that tells; else the service that recorded it."""
        above = span
        for _ in range(len(self._by_id)):
            prefix = above.name.split(".")[0]
            if prefix in ("prefill", "decode"):
                return prefix
            found = self._by_id.get(above.parent_span_id or "")
            if found is None:
                break
            above = found
        return span.service or "elsewhere"

    def _runs(self, children: Sequence[SpanRecord]) -> list[list[SpanRecord]]:
        chunks = [span for span in children if span.name == names.CHUNK and span.span_id not in self._children]
        if len(chunks) <= self._fold_chunks_over:
            return [[span] for span in children]
        chunks.sort(key=_chunk_index)
        folded = [
            [span for _, span in run]
            for _, run in groupby(enumerate(chunks), lambda at: (_chunk_index(at[1]) - at[0], _fate(at[1])))
        ]
        ids = {span.span_id for span in chunks}
        others = [[span] for span in children if span.span_id not in ids]
        return sorted([*others, *folded], key=lambda run: min(_order(span) for span in run))


def _order(span: SpanRecord) -> tuple[int, int, int, str]:
    """By start; a parent begins with its children and ends after them, so the longer first; then chunk order."""
    return (span.start_ns, _chunk_index(span), -span.end_ns, span.span_id)


def _main_traces(spans: Sequence[SpanRecord], request_id: str) -> tuple[str, ...]:
    of_request = [span for span in spans if span.request_id == request_id]
    serving = [span for span in of_request if span.name in _PARTS] or of_request[:1]
    return tuple(dict.fromkeys(span.trace_id for span in serving))


def _concerns(span: SpanRecord, request_id: str, trace_ids: Sequence[str]) -> bool:
    return span.request_id == request_id or any(link.trace_id in trace_ids for link in span.links)


def _first_token_ns(root: SpanRecord | None) -> int | None:
    if root is None:
        return None
    event = next((event for event in root.events if event.name == names.EVENT_FIRST_TOKEN), None)
    if event is not None:
        return event.time_ns
    ttft_ms = _number(root, a.TTFT_MS)
    return None if ttft_ms is None else root.start_ns + round(ttft_ms * _NS_PER_MS)


def _ttft_ms(spans: Sequence[SpanRecord], root: SpanRecord | None, first_token_ns: int | None) -> float | None:
    told = next((value for span in spans if (value := _number(span, a.TTFT_MS)) is not None), None)
    if told is None and root is not None and first_token_ns is not None:
        return (first_token_ns - root.start_ns) / _NS_PER_MS
    return told


def _row(span: SpanRecord, depth: int, label: str, start_ns: int) -> Row:
    return Row(
        depth=depth,
        label=label,
        kind=_kind(span),
        start_ms=(span.start_ns - start_ns) / _NS_PER_MS,
        duration_ms=span.duration_ns / _NS_PER_MS,
        detail=_detail(span),
        failed=span.failed,
    )


def _folded_row(run: Sequence[SpanRecord], depth: int, start_ns: int) -> Row:
    begin, end = min(span.start_ns for span in run), max(span.end_ns for span in run)
    num_bytes = sum(int(_number(span, a.CHUNK_BYTES) or 0) for span in run)
    return Row(
        depth=depth,
        label=f"chunks {_chunk_index(run[0])}–{_chunk_index(run[-1])}",
        kind=_kind(run[0]),
        start_ms=(begin - start_ns) / _NS_PER_MS,
        duration_ms=(end - begin) / _NS_PER_MS,
        detail=_chunk_detail(run[0], num_bytes, None),
        failed=run[0].failed,
    )


def _kind(span: SpanRecord) -> RowKind:
    if span.name in _ENVELOPES:
        return RowKind.ENVELOPE
    if span.name in _WAITS:
        return RowKind.WAIT
    if span.name in _MOVES:
        return RowKind.MOVE
    if span.name == names.CHUNK and span.attributes.get(a.CHUNK_OUTCOME) != ChunkOutcome.COMPUTED:
        return RowKind.MOVE
    return RowKind.WORK


def _label(span: SpanRecord, parent: SpanRecord | None) -> str:
    """The span's name without what its place says already: `prefill.queue` under prefill is `queue`."""
    if span.name == names.CHUNK:
        index = span.attributes.get(a.CHUNK_INDEX)
        return "chunk" if index is None else f"chunk {index}"
    service, _, rest = span.name.partition(".")
    if span.name in _ENVELOPES:
        return service
    return rest if parent is not None and rest and parent.name.startswith(f"{service}.") else span.name


def _later_label(span: SpanRecord) -> str:
    index = span.attributes.get(a.CHUNK_INDEX)
    return span.name if index is None or span.name == names.CHUNK else f"{span.name} chunk {index}"


def _detail(span: SpanRecord) -> str:
    if span.failed:
        return span.status_message or "failed"
    if span.name in _ENVELOPES:
        worker = _text(span, a.WORKER) or span.worker
        node = _text(span, a.NODE) or span.node
        return " on ".join(part for part in (worker, node) if part)
    if a.CHUNK_OUTCOME in span.attributes or a.CHUNK_BYTES in span.attributes or a.CHUNK_SOURCE in span.attributes:
        return _chunk_detail(span, int(_number(span, a.CHUNK_BYTES) or 0), _number(span, a.CHUNK_QUEUE_WAIT_MS))
    return _text(span, a.NODE) or ""


def _chunk_detail(span: SpanRecord, num_bytes: int, queue_wait_ms: float | None) -> str:
    """`hit_remote node-b→node-a tcp 1.5 MB`, or `… shm in place 1.5 MB`, as far as it is known."""
    source, destination = _text(span, a.CHUNK_SOURCE), _text(span, a.CHUNK_DESTINATION)
    places = [place for place in dict.fromkeys((source, destination)) if place]
    tier, outcome = _text(span, a.CHUNK_TIER), _text(span, a.CHUNK_OUTCOME)
    parts = [
        outcome,
        "→".join(places),
        tier if tier != outcome else None,
        _text(span, a.CHUNK_TRANSPORT),
        "in place" if span.attributes.get(a.CHUNK_IN_PLACE) else None,
        _bytes_text(num_bytes) if num_bytes else None,
        f"queued {queue_wait_ms:.1f} ms" if queue_wait_ms is not None and queue_wait_ms >= 0.05 else None,
    ]
    return " ".join(part for part in parts if part)


def _fate(span: SpanRecord) -> tuple[object, ...]:
    told = (a.CHUNK_OUTCOME, a.CHUNK_SOURCE, a.CHUNK_DESTINATION, a.CHUNK_TRANSPORT, a.CHUNK_IN_PLACE, a.CHUNK_TIER)
    return (span.status_message, *(span.attributes.get(name) for name in told))


def _bytes_text(num_bytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


def _chunk_index(span: SpanRecord) -> int:
    value = span.attributes.get(a.CHUNK_INDEX)
    return value if isinstance(value, int) else -1


def _text(span: SpanRecord, name: str) -> str | None:
    value = span.attributes.get(name)
    return value if isinstance(value, str) else None


def _number(span: SpanRecord, name: str) -> float | None:
    value = span.attributes.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def _first_text(spans: Sequence[SpanRecord], name: str) -> str | None:
    return next((value for span in spans if (value := _text(span, name)) is not None), None)


def _first_int(spans: Sequence[SpanRecord], name: str) -> int | None:
    return next((int(value) for span in spans if (value := _number(span, name)) is not None), None)
