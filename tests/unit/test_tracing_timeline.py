"""The waterfall of a request: what it says, and exactly how it looks."""

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.tracing import attributes as a
from halfmoon.tracing import names as n
from halfmoon.tracing.record import EventRecord, LinkRecord, SpanRecord, Value
from halfmoon.tracing.render import render
from halfmoon.tracing.timeline import RowKind, build

TRACE = "0af7651916cd43dd8448eb211c80319c"
MB_11_8 = 11_796_480


@dataclass
class Script:
    """Writes the spans of one request; times in milliseconds after an arbitrary epoch."""

    epoch_ms: int = 1_700_000_000_000
    spans: list[SpanRecord] = field(default_factory=list)

    def span(
        self,
        name: str,
        start_ms: float,
        end_ms: float,
        parent: SpanRecord | None = None,
        attributes: dict[str, Value] | None = None,
        *,
        worker: str = "",
        node: str = "",
        error: str = "",
        first_token_ms: float | None = None,
    ) -> SpanRecord:
        span = SpanRecord(
            trace_id=TRACE,
            span_id=f"{len(self.spans) + 1:016x}",
            parent_span_id=parent.span_id if parent is not None else None,
            name=name,
            start_ns=self._ns(start_ms),
            end_ns=self._ns(end_ms),
            status="error" if error else "unset",
            status_message=error,
            attributes={a.REQUEST_ID: "req-1", **(attributes or {})},
            worker=worker,
            node=node,
            events=()
            if first_token_ms is None
            else (EventRecord(name=n.EVENT_FIRST_TOKEN, time_ns=self._ns(first_token_ms)),),
        )
        self.spans.append(span)
        return span

    def chunk(
        self, index: int, start_ms: float, end_ms: float, parent: SpanRecord, outcome: str, **facts: Value
    ) -> SpanRecord:
        named = {f"halfmoon.chunk.{name}": value for name, value in facts.items()}
        attributes: dict[str, Value] = {a.CHUNK_INDEX: index, a.CHUNK_OUTCOME: outcome, **named}
        return self.span(n.CHUNK, start_ms, end_ms, parent, attributes)

    def evict(self, index: int, at_ms: float) -> None:
        self.spans.append(
            SpanRecord(
                trace_id="f" * 32,
                span_id=f"{index:016x}",
                name=n.KVTIER_EVICT,
                start_ns=self._ns(at_ms),
                end_ns=self._ns(at_ms + 1),
                attributes={
                    a.CHUNK_INDEX: index,
                    a.CHUNK_SOURCE: "node-a",
                    a.CHUNK_TIER: "dram",
                    a.CHUNK_BYTES: MB_11_8,
                },
                links=(LinkRecord(trace_id=TRACE, span_id="1" * 16),),
            )
        )

    def _ns(self, ms: float) -> int:
        return self.epoch_ms * 1_000_000 + round(ms * 1_000_000)


def _prefill(script: Script, gateway: SpanRecord | None) -> None:
    prefill = script.span(n.PREFILL_REQUEST, 2.5, 130, gateway, worker="prefill-0", node="node-a")
    script.span(n.PREFILL_QUEUE, 2.6, 20, prefill)
    acquire = script.span(n.PREFILL_ACQUIRE, 20, 33, prefill)
    script.chunk(0, 20, 20.2, acquire, "hit_local", source="node-a", destination="node-a")
    moved: dict[str, Value] = {"source": "node-b", "destination": "node-a", "transport": "tcp", "bytes": MB_11_8}
    script.chunk(1, 20.5, 32.5, acquire, "hit_remote", queue_wait_ms=1.4, **moved)
    compute = script.span(n.PREFILL_COMPUTE, 33, 129, prefill)
    for index in (2, 3):
        start = 33 + 48 * (index - 2)
        script.chunk(index, start, start + 48, compute, "computed", destination="node-a", bytes=MB_11_8)


def _whole_request() -> Script:
    script = Script()
    told: dict[str, Value] = {
        a.TTFT_MS: 152.0,
        a.GEN_AI_REQUEST_MODEL: "smollm2-135m",
        a.GEN_AI_USAGE_INPUT_TOKENS: 1000,
        a.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: 512,
        a.GEN_AI_USAGE_OUTPUT_TOKENS: 16,
    }
    gateway = script.span(n.GATEWAY_REQUEST, 0, 400, attributes=told, first_token_ms=152)
    script.span(n.CONDUCTOR_SCHEDULE, 0.4, 1.9, gateway)
    _prefill(script, gateway)
    decode = script.span(n.DECODE_REQUEST, 2.6, 398, gateway, worker="decode-0", node="node-b")
    script.span(n.DECODE_QUEUE, 2.7, 5, decode)
    wait = script.span(n.DECODE_WAIT_KV, 5, 135, decode)
    moved: dict[str, Value] = {"source": "node-a", "destination": "node-b", "transport": "shm", "bytes": MB_11_8}
    for index, start in enumerate((22, 34, 82, 128)):
        script.chunk(index, start, start + 6, wait, "hit_remote", **moved)
    script.span(n.DECODE_GENERATE, 135, 398, decode)
    script.evict(3, 12_000)
    return script


WHOLE = """\
request req-1   trace 0af7651916cd43dd8448eb211c80319c
smollm2-135m   prompt 1000 tokens (512 cached)   completion 16 tokens
TTFT 152.00 ms   total 400.00 ms
chunks at prefill: 1 hit_local, 1 hit_remote, 2 computed
chunks at decode: 4 hit_remote

what                 start ms       ms  0 ms ──────── 400 ms  detail
gateway                  0.00   400.00  ────────────────────
  first token          152.00                  ◆
  conductor.schedule     0.40     1.50  █
  prefill                2.50   127.50  ───────               prefill-0 on node-a
    queue                2.60    17.40  ░
    acquire             20.00    13.00   ▒
      chunk 0           20.00     0.20   ▒                    hit_local node-a
      chunk 1           20.50    12.00   ▒                    hit_remote node-b→node-a tcp 11.8 MB …
    compute             33.00    96.00   ██████
      chunk 2           33.00    48.00   ████                 computed node-a 11.8 MB
      chunk 3           81.00    48.00      ███               computed node-a 11.8 MB
  decode                 2.60   395.40  ────────────────────  decode-0 on node-b
    queue                2.70     2.30  ░
    wait_kv              5.00   130.00  ░░░░░░░
      chunk 0           22.00     6.00   ▒                    hit_remote node-a→node-b shm 11.8 MB
      chunk 1           34.00     6.00   ▒                    hit_remote node-a→node-b shm 11.8 MB
      chunk 2           82.00     6.00      ▒                 hit_remote node-a→node-b shm 11.8 MB
      chunk 3          128.00     6.00        ▒               hit_remote node-a→node-b shm 11.8 MB
    generate           135.00   263.00        ██████████████

░ waiting   ▒ moving KV   █ computing   ◆ first token

later, to this request's chunks
  +12.00 s  kvtier.evict chunk 3  node-a dram 11.8 MB
"""

PARTIAL = """\
request req-1   trace 0af7651916cd43dd8448eb211c80319c
TTFT not recorded   total 127.50 ms
chunks at prefill: 1 hit_local, 1 hit_remote, 2 computed

what                start ms       ms  0 ms ──────── 128 ms  detail
prefill                 0.00   127.50  ────────────────────  prefill-0 on node-a
  queue                 0.10    17.40  ░░░
  acquire              17.50    13.00    ▒▒▒
    chunk 0            17.50     0.20    ▒                   hit_local node-a
    kvtier.transfer    17.90    12.20    ▒▒▒                 ✗ stale: the lease on slot 17 expired;…
    chunk 1            18.00    12.00    ▒▒▒                 hit_remote node-b→node-a tcp 11.8 MB q…
  compute              30.50    96.00      ████████████████
    chunk 2            30.50    48.00      █████████         computed node-a 11.8 MB
    chunk 3            78.50    48.00              ████████  computed node-a 11.8 MB

░ waiting   ▒ moving KV   █ computing   ◆ first token

not seen: gateway.request, conductor.schedule, decode.request
(still running, sampled out, not part of this request, or kept in another host's store)
"""


def _assert_looks(drawn: str, expected: str) -> None:
    assert drawn.splitlines() == expected.splitlines()


def test_whole_request_looks_like_this() -> None:
    _assert_looks(render(build(_whole_request().spans, "req-1"), width=100), WHOLE)


def test_partial_request_looks_like_this() -> None:
    """Only the prefill worker's spans have arrived, and its transfer failed."""
    script = Script()
    lost_parent = SpanRecord(trace_id=TRACE, span_id="a" * 16, name="elsewhere", start_ns=0, end_ns=0)
    _prefill(script, lost_parent)
    acquire = next(span for span in script.spans if span.name == n.PREFILL_ACQUIRE)
    script.span(n.KVTIER_TRANSFER, 20.4, 32.6, acquire, error="stale: the lease on slot 17 expired; acquire it again")
    _assert_looks(render(build(script.spans, "req-1"), width=100), PARTIAL)


def test_order_and_repeats_of_the_input_do_not_matter() -> None:
    spans = _whole_request().spans
    expected = build(spans, "req-1")
    shuffled = spans * 2
    for seed in range(10):
        random.Random(seed).shuffle(shuffled)
        assert build(shuffled, "req-1") == expected


def test_waterfall_facts() -> None:
    waterfall = build(_whole_request().spans, "req-1")
    assert waterfall.ttft_ms == 152.0
    assert waterfall.total_ms == 400.0
    assert (waterfall.prompt_tokens, waterfall.cached_tokens, waterfall.completion_tokens) == (1000, 512, 16)
    assert waterfall.outcomes == {
        "prefill": {"hit_local": 1, "hit_remote": 1, "computed": 2},
        "decode": {"hit_remote": 4},
    }
    assert waterfall.not_seen == ()
    kinds = {row.label: row.kind for row in waterfall.rows}
    assert kinds["queue"] is kinds["wait_kv"] is RowKind.WAIT
    assert kinds["compute"] is kinds["generate"] is RowKind.WORK
    assert kinds["acquire"] is RowKind.MOVE


def test_ttft_comes_from_the_event_where_the_attribute_is_missing() -> None:
    script = Script()
    script.span(n.GATEWAY_REQUEST, 10, 90, first_token_ms=35)
    assert build(script.spans, "req-1").ttft_ms == 25.0


def test_many_chunks_fold_by_what_became_of_them() -> None:
    script = Script()
    prefill = script.span(n.PREFILL_REQUEST, 0, 1000)
    acquire = script.span(n.PREFILL_ACQUIRE, 0, 500, prefill)
    for index in range(390):
        outcome = "corrupt" if index == 200 else "hit_local"
        script.chunk(index, index, index + 1, acquire, outcome, source="node-a", bytes=1_000_000)
    labels = [(row.label, row.detail) for row in build(script.spans, "req-1").rows]
    assert labels == [
        ("prefill", ""),
        ("acquire", ""),
        ("chunks 0–199", "hit_local node-a 200.0 MB"),
        ("chunk 200", "corrupt node-a 1.0 MB"),
        ("chunks 201–389", "hit_local node-a 189.0 MB"),
    ]
    assert len(build(script.spans, "req-1", fold_chunks_over=390).rows) == 392


def test_retried_prefill_shows_both_attempts() -> None:
    script = Script()
    gateway = script.span(n.GATEWAY_REQUEST, 0, 100)
    script.span(n.PREFILL_REQUEST, 1, 20, gateway, worker="prefill-0", error="worker_lost: no heartbeat for 1 s")
    script.span(n.PREFILL_REQUEST, 21, 60, gateway, worker="prefill-1")
    rows = [(row.label, row.detail, row.failed) for row in build(script.spans, "req-1").rows[1:]]
    assert rows == [
        ("prefill", "worker_lost: no heartbeat for 1 s", True),
        ("prefill", "prefill-1", False),
    ]


def test_later_life_does_not_stretch_the_axis() -> None:
    script = _whole_request()
    before = build([span for span in script.spans if span.trace_id == TRACE], "req-1")
    after = build(script.spans, "req-1")
    assert after.total_ms == before.total_ms
    assert after.rows == before.rows
    assert [row.label for row in after.later] == ["kvtier.evict chunk 3"]


def test_no_span_of_the_request_is_an_error() -> None:
    with pytest.raises(ValueError, match="no span belongs to request req-2"):
        build(_whole_request().spans, "req-2")
    with pytest.raises(ValueError, match="no span belongs to request req-1"):
        build([], "req-1")


@given(
    lost=st.sets(st.integers(min_value=0, max_value=17), max_size=17),
    width=st.integers(min_value=0, max_value=200),
    skew_ms=st.integers(min_value=-500, max_value=500),
)
def test_any_part_of_a_request_can_be_drawn(lost: set[int], width: int, skew_ms: int) -> None:
    """Whatever is missing, and however clocks differ: every span has its row, and no line is too long."""
    whole = [span for span in _whole_request().spans if span.trace_id == TRACE]
    assert len(whole) == 18
    found = [
        replace(span, start_ns=span.start_ns + skew_ms * 10**6, end_ns=span.end_ns + skew_ms * 10**6)
        if span.name.startswith("decode")
        else span
        for index, span in enumerate(whole)
        if index not in lost
    ]
    waterfall = build(found, "req-1", fold_chunks_over=len(whole))
    assert sum(row.kind is not RowKind.MARK for row in waterfall.rows) == len(found)
    assert all(row.start_ms >= 0 or row.kind is RowKind.MARK for row in waterfall.rows)
    assert all(len(line) <= max(width, 60) for line in render(waterfall, width).splitlines())


def test_a_chunk_that_was_read_in_place_says_so() -> None:
    script = Script()
    gateway = script.span(n.GATEWAY_REQUEST, 0, 40)
    moved: dict[str, Value] = {"source": "node-a", "destination": "node-b", "transport": "shm", "bytes": MB_11_8}
    script.chunk(0, 5, 5, gateway, "hit_remote", in_place=True, **moved)
    script.chunk(1, 6, 8, gateway, "hit_remote", **moved)
    shown = render(build(script.spans, "req-1"), 120)
    assert "hit_remote node-a→node-b shm in place 11.8 MB" in shown
    assert "hit_remote node-a→node-b shm 11.8 MB" in shown
