"""OTLP export against a real HTTP receiver, one that is down, and one that hangs."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from socket import create_server

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from halfmoon.tracing import Telemetry, TelemetryConfig, setup
from halfmoon.tracing.export import resolve_endpoint
from halfmoon.tracing.pipeline import Pipeline
from support.otlp import Collector


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(autouse=True)
def _no_endpoint_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)


def _unused_url() -> str:
    with create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return f"http://127.0.0.1:{port}"


def _service(url: str, timeout_s: float = 0.3) -> Telemetry:
    config = TelemetryConfig(otlp_endpoint=url, otlp_timeout_s=timeout_s, node="node-a", export_interval_s=0.01)
    return setup("gateway", config)


def test_spans_arrive_as_otlp(collector: Collector) -> None:
    telemetry = _service(collector.url)
    with telemetry.tracer.span("gateway.request", attributes={"halfmoon.request_id": "req-1"}) as root:
        root.add_event("first_token")
        telemetry.tracer.record_span("chunk", 10, 20, attributes={"halfmoon.chunk.index": 3})
    assert telemetry.shutdown()
    assert {path for path, _ in collector.requests} == {"/v1/traces"}
    resources = [resource for _, request in collector.requests for resource in request.resource_spans]
    for resource in resources:
        told = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
        assert told == {
            "service.name": "gateway",
            "service.namespace": "halfmoon",
            "halfmoon.node": "node-a",
        }
    spans = {span.name: span for r in resources for scope in r.scope_spans for span in scope.spans}
    assert spans.keys() == {"gateway.request", "chunk"}
    chunk, request = spans["chunk"], spans["gateway.request"]
    assert (chunk.start_time_unix_nano, chunk.end_time_unix_nano) == (10, 20)
    assert chunk.parent_span_id == request.span_id
    assert chunk.trace_id == request.trace_id
    assert chunk.attributes[0].key == "halfmoon.chunk.index"
    assert chunk.attributes[0].value.int_value == 3
    assert [event.name for event in request.events] == ["first_token"]
    assert telemetry.stats()["otlp"].exported == 2


def test_endpoint_from_the_standard_variable(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    telemetry = setup("gateway", TelemetryConfig(export_interval_s=0.01))
    with telemetry.tracer.span("work"):
        pass
    assert telemetry.shutdown()
    assert len(collector.requests) == 1


def test_collector_down_costs_one_warning_and_a_count(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = _service(_unused_url())
    began = time.monotonic()
    for batch in range(3):
        for index in range(50):
            with telemetry.tracer.span(f"span {batch}.{index}"):
                pass
        assert telemetry.flush(5)
    assert telemetry.shutdown(5)
    assert time.monotonic() - began < 15
    stats = telemetry.stats()["otlp"]
    assert (stats.pending, stats.exported, stats.dropped, stats.failed) == (0, 0, 0, 150)
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "docker compose up jaeger" in line.getMessage()
    assert "Serving is not affected" in line.getMessage()


def test_collector_that_comes_back_gets_spans_again(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="halfmoon.tracing.export")
    telemetry = _service(collector.url)
    collector.status = 500
    with telemetry.tracer.span("lost"):
        pass
    assert telemetry.flush(5)
    collector.status = 200
    with telemetry.tracer.span("kept"):
        pass
    assert telemetry.shutdown()
    stats = telemetry.stats()["otlp"]
    assert (stats.exported, stats.failed) == (1, 1)
    levels = [record.levelname for record in caplog.records if record.name == "halfmoon.tracing.export"]
    assert levels == ["WARNING", "INFO"]


def test_hanging_collector_blocks_neither_spans_nor_shutdown() -> None:
    with create_server(("127.0.0.1", 0)) as silent:
        telemetry = _service(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=2.0)
        began = time.monotonic()
        for index in range(10_000):
            telemetry.tracer.record_span(f"span {index}", 1, 2)
        assert not telemetry.shutdown(timeout_s=0.2)
        assert time.monotonic() - began < 20
        stats = telemetry.stats()["otlp"]
        assert stats.pending + stats.exported + stats.dropped + stats.failed == 10_000
        assert stats.exported == 0


def test_full_queue_drops_the_newest_and_counts_them() -> None:
    blocked = threading.Event()
    started = threading.Event()

    class Blocking(InMemorySpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            started.set()
            blocked.wait(10)
            return super().export(spans)

    memory = Blocking()
    pipeline = Pipeline(memory, "memory", max_pending=8, max_batch=4, interval_s=0.01)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(pipeline)
    tracer = provider.get_tracer("test")
    tracer.start_span("0").end()
    assert started.wait(5)
    for index in range(1, 20):
        tracer.start_span(str(index)).end()
    assert pipeline.stats().pending == 9
    assert not pipeline.force_flush(50)
    blocked.set()
    assert pipeline.close(5)
    assert [span.name for span in memory.get_finished_spans()] == [str(index) for index in range(9)]
    stats = pipeline.stats()
    assert (stats.pending, stats.exported, stats.dropped, stats.failed) == (0, 9, 11, 0)


def test_exporter_that_raises_does_not_end_the_pipeline(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(InMemorySpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            if spans[0].name == "bad":
                raise RuntimeError("broken exporter")
            return super().export(spans)

    telemetry = setup("test", TelemetryConfig(export_interval_s=0.01), exporters={"memory": Broken()})
    for name in ("bad", "good"):
        with telemetry.tracer.span(name):
            pass
        assert telemetry.flush(5)
    stats = telemetry.stats()["memory"]
    assert (stats.exported, stats.failed) == (1, 1)
    assert telemetry.shutdown()
    assert "broken exporter" in caplog.text


@pytest.mark.parametrize(
    ("configured", "environ", "expected"),
    [
        (None, {}, None),
        ("http://c:4318", {}, "http://c:4318/v1/traces"),
        ("http://c:4318/", {}, "http://c:4318/v1/traces"),
        ("https://c/otlp", {}, "https://c/otlp/v1/traces"),
        ("http://c:4318/v1/traces", {}, "http://c:4318/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://e:4318"}, "http://e:4318/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://e:4318/in"}, "http://e:4318/in"),
        ("http://c:4318", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://e:4318"}, "http://c:4318/v1/traces"),
    ],
)
def test_endpoint_resolution(configured: str | None, environ: dict[str, str], expected: str | None) -> None:
    assert resolve_endpoint(configured, environ) == expected


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://c:4317", "http://"])
def test_malformed_endpoint_fails_at_start(endpoint: str) -> None:
    with pytest.raises(ValueError, match="not an http\\(s\\) URL; give the collector's"):
        setup("gateway", TelemetryConfig(otlp_endpoint=endpoint))
