"""Trace context survives the way through message headers."""

import asyncio

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from halfmoon.tracing import (
    Context,
    TelemetryConfig,
    Tracer,
    attached,
    context_of,
    current,
    extract,
    inject,
    link_to,
    noop_tracer,
    setup,
    traceparent,
)
from halfmoon.tracing.context import span_context, trace_id_of


class Recorder:
    """A telemetry whose spans can be read back."""

    def __init__(self) -> None:
        self._memory = InMemorySpanExporter()
        self.telemetry = setup("test", TelemetryConfig(export_interval_s=0.01), exporters={"memory": self._memory})

    @property
    def tracer(self) -> Tracer:
        return self.telemetry.tracer

    def spans(self) -> dict[str, ReadableSpan]:
        assert self.telemetry.shutdown()
        return {span.name: span for span in self._memory.get_finished_spans()}


def _identity(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def test_round_trip_makes_the_receiver_a_child() -> None:
    recorder = Recorder()
    headers = {"halfmoon-reply": "inbox"}
    with recorder.tracer.span("sender"):
        inject(headers)
    assert headers["halfmoon-reply"] == "inbox"
    with recorder.tracer.span("receiver", parent=extract(headers)):
        pass
    spans = recorder.spans()
    parent = spans["receiver"].parent
    assert parent is not None
    assert parent.is_remote
    assert (parent.trace_id, parent.span_id) == _identity(spans["sender"])


def test_header_names_have_no_case() -> None:
    value = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    found = extract({"Traceparent": value, "TraceState": "vendor=1"})
    again: dict[str, str] = {}
    inject(again, found)
    assert again == {"traceparent": value, "tracestate": "vendor=1"}
    assert trace_id_of(found) == "0af7651916cd43dd8448eb211c80319c"


def test_missing_or_malformed_headers_start_a_new_root() -> None:
    recorder = Recorder()
    with recorder.tracer.span("unrelated"):
        for index, headers in enumerate(({}, None, {"traceparent": "00-zz-1-01"}, {"traceparent": "00-" + "0" * 32})):
            assert span_context(extract(headers)) is None
            with recorder.tracer.span(f"root {index}", parent=extract(headers)):
                pass
    spans = recorder.spans()
    traces = {_identity(spans[f"root {index}"])[0] for index in range(4)}
    assert len(traces) == 4
    assert all(spans[f"root {index}"].parent is None for index in range(4))
    assert _identity(spans["unrelated"])[0] not in traces


def test_nothing_is_injected_without_a_span() -> None:
    headers: dict[str, str] = {}
    inject(headers, Context())
    assert headers == {}
    assert traceparent(Context()) is None


async def test_current_span_follows_tasks_and_not_their_siblings() -> None:
    recorder = Recorder()
    both_open = asyncio.Barrier(2)

    async def work(name: str) -> None:
        with recorder.tracer.span(name):
            await both_open.wait()
            with recorder.tracer.span(f"{name} inner"):
                await both_open.wait()

    with recorder.tracer.span("outer"):
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            group.create_task(work("a"))
            group.create_task(work("b"))
    assert span_context() is None
    spans = recorder.spans()
    parents = {name: span.parent.span_id for name, span in spans.items() if span.parent is not None}
    ids = {name: _identity(span)[1] for name, span in spans.items()}
    assert parents == {"a": ids["outer"], "b": ids["outer"], "a inner": ids["a"], "b inner": ids["b"]}


def test_attached_context_is_current_only_inside() -> None:
    recorder = Recorder()
    headers: dict[str, str] = {}
    with recorder.tracer.span("sender"):
        inject(headers)
    before = span_context(current())
    with attached(extract(headers)), recorder.tracer.span("handled"):
        pass
    assert span_context(current()) == before
    spans = recorder.spans()
    parent = spans["handled"].parent
    assert parent is not None
    assert parent.span_id == _identity(spans["sender"])[1]


def test_links_lead_back_through_a_stored_traceparent() -> None:
    recorder = Recorder()
    with recorder.tracer.span("request") as span:
        kept = traceparent()
        assert kept == traceparent(context_of(span)) == traceparent(context_of(span.get_span_context()))
    with recorder.tracer.span("evict", parent=Context(), links=link_to(kept)):
        pass
    spans = recorder.spans()
    (link,) = spans["evict"].links
    assert (link.context.trace_id, link.context.span_id) == _identity(spans["request"])
    assert _identity(spans["evict"])[0] != _identity(spans["request"])[0]
    assert link_to(None) == ()
    assert link_to("nonsense") == ()


def test_noop_tracer_passes_the_parent_on() -> None:
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    with noop_tracer().span("quiet", parent=extract(headers)) as span:
        assert not span.is_recording()
        onward: dict[str, str] = {}
        inject(onward)
    assert onward == headers
