"""Metrics: names, registries of their own, and the endpoint over real HTTP."""

from collections.abc import Iterator
from socket import create_server
from urllib.request import urlopen

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY, generate_latest

from halfmoon.tracing import TelemetryConfig, setup
from halfmoon.tracing.metrics import Metrics, MetricsServer, serve_metrics


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def _scrape(metrics: Metrics) -> dict[str, float]:
    lines = generate_latest(metrics.registry).decode().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in samples if not name.split("{")[0].endswith("_created")}


def test_names_follow_the_rule(metrics: Metrics) -> None:
    metrics.counter("requests", "Requests by outcome.", ["outcome"]).labels("finished").inc(3)
    metrics.gauge("pool_free", "Free bytes of the arena.", ["node"], unit="bytes").labels("node-a").set(4096)
    metrics.gauge("slots", "Slots of the arena.").set(7)
    metrics.histogram("ttft", "Time to first token.", buckets=[0.1, 1.0]).observe(0.5)
    assert _scrape(metrics) == {
        'halfmoon_requests_total{outcome="finished"}': 3,
        'halfmoon_pool_free_bytes{node="node-a"}': 4096,
        "halfmoon_slots": 7,
        'halfmoon_ttft_seconds_bucket{le="0.1"}': 0,
        'halfmoon_ttft_seconds_bucket{le="1.0"}': 1,
        'halfmoon_ttft_seconds_bucket{le="+Inf"}': 1,
        "halfmoon_ttft_seconds_count": 1,
        "halfmoon_ttft_seconds_sum": 0.5,
    }


@pytest.mark.parametrize("thing", ["halfmoon_requests", "requests_total", "Requests", "a-b", "", "a__b"])
def test_names_off_the_rule_are_refused(metrics: Metrics, thing: str) -> None:
    with pytest.raises(ValueError, match="metric thing"):
        metrics.counter(thing, "Something.")


def test_units_are_base_units(metrics: Metrics) -> None:
    with pytest.raises(ValueError, match="use one of seconds, bytes"):
        metrics.histogram("ttft", "Time to first token.", unit="ms")


def test_registries_are_apart(metrics: Metrics) -> None:
    metrics.counter("requests", "Requests.").inc()
    other = Metrics()
    other.counter("requests", "Requests.")
    assert _scrape(other) == {"halfmoon_requests_total": 0}
    assert not any(family.name.startswith("halfmoon") for family in REGISTRY.collect())


@pytest.fixture
def server(metrics: Metrics) -> Iterator[MetricsServer]:
    server = serve_metrics(metrics.registry, port=0)
    assert server is not None
    with server:
        yield server


def test_served_over_http(metrics: Metrics, server: MetricsServer) -> None:
    metrics.gauge("slots", "Slots of the arena.").set(7)
    with urlopen(server.url, timeout=5) as response:
        assert b"halfmoon_slots 7.0" in response.read()
    server.close()
    server.close()
    with create_server(("127.0.0.1", server.port)):
        """The port is free again."""


def test_off_without_a_port(metrics: Metrics) -> None:
    assert serve_metrics(metrics.registry) is None


def test_taken_port_says_so(metrics: Metrics, server: MetricsServer) -> None:
    with pytest.raises(OSError, match=rf"can't be served on 127\.0\.0\.1:{server.port} .*choose another metrics port"):
        serve_metrics(metrics.registry, port=server.port)


def test_fate_of_spans_is_a_metric(metrics: Metrics) -> None:
    telemetry = setup("test", TelemetryConfig(), exporters={"memory": InMemorySpanExporter()})
    metrics.observe_telemetry(telemetry)
    for _ in range(2):
        telemetry.tracer.record_span("chunk", 1, 2)
    assert telemetry.shutdown()
    telemetry.tracer.record_span("late", 1, 2)
    assert _scrape(metrics) == {
        'halfmoon_spans_pending{exporter="memory"}': 0,
        'halfmoon_spans_total{exporter="memory",fate="exported"}': 2,
        'halfmoon_spans_total{exporter="memory",fate="dropped"}': 1,
        'halfmoon_spans_total{exporter="memory",fate="failed"}': 0,
    }
