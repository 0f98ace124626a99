"""Prometheus metrics, with one registry per service and one way to name things.

Names are `halfmoon_<thing>_<unit>`, in base units (seconds, bytes, tokens); counters end in `_total`. Labels are few
and bounded: a worker, a node, an outcome; never a request id, a tenant's text or a chunk key.
"""

import re
from collections.abc import Iterable, Sequence
from threading import Thread
from types import TracebackType
from typing import Final, Self
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from halfmoon.tracing.telemetry import Telemetry

UNITS: Final = ("seconds", "bytes", "tokens", "ratio", "bytes_per_second", "tokens_per_second", "timestamp_seconds")
"""Units that a gauge or histogram may end in. A bare count (`halfmoon_slots`) has no unit: pass `unit=None`."""

LATENCY_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""From one hop over the broker to a long prompt's TTFT."""

_THING = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


class Metrics:
    """A registry of its own, and metrics that follow the naming rule. One per service; nothing is global."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def counter(self, thing: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
        """`halfmoon_<thing>_total`; a unit, where there is one, is part of `thing` (`kv_transferred_bytes`)."""
        return Counter(_name(thing, None), help_text, labels, registry=self.registry)

    def gauge(self, thing: str, help_text: str, labels: Sequence[str] = (), *, unit: str | None = None) -> Gauge:
        return Gauge(_name(thing, unit), help_text, labels, registry=self.registry)

    def histogram(
        self,
        thing: str,
        help_text: str,
        labels: Sequence[str] = (),
        *,
        unit: str = "seconds",
        buckets: Sequence[float] = LATENCY_BUCKETS_S,
    ) -> Histogram:
        return Histogram(_name(thing, unit), help_text, labels, registry=self.registry, buckets=buckets)

    def observe_telemetry(self, telemetry: Telemetry) -> None:
        """Export what became of the service's spans: pending, exported, dropped, failed, by exporter."""
        self.registry.register(_TelemetryCollector(telemetry))


class MetricsServer:
    """Answers `GET /metrics` from a thread of its own. `close` is idempotent; also a context manager."""

    def __init__(self, host: str, server: WSGIServer, thread: Thread) -> None:
        self.host = host
        self.port = server.server_port
        self._server = server
        self._thread: Thread | None = thread

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}/metrics"

    def close(self) -> None:
        if self._thread is None:
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)
        self._thread = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def serve_metrics(
    registry: CollectorRegistry, host: str = "127.0.0.1", port: int | None = None
) -> MetricsServer | None:
    """Serve `registry` for Prometheus; None when `port` is None (off). Port 0 takes a free one: see `.port`.

    Raises `OSError` naming the address when it can't be bound.
    """
    if port is None:
        return None
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise OSError(
            error.errno,
            f"metrics can't be served on {host}:{port} ({error.strerror or error}); choose another metrics port, "
            "or leave it out to switch them off",
        ) from error
    return MetricsServer(host, server, thread)


class _TelemetryCollector(Collector):
    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def collect(self) -> Iterable[Metric]:
        pending = GaugeMetricFamily("halfmoon_spans_pending", "Spans that wait to be exported.", labels=["exporter"])
        ended = CounterMetricFamily(
            "halfmoon_spans", "Spans that left the queue, by exporter and fate.", labels=["exporter", "fate"]
        )
        for exporter, stats in self._telemetry.stats().items():
            pending.add_metric([exporter], stats.pending)
            for fate, count in (("exported", stats.exported), ("dropped", stats.dropped), ("failed", stats.failed)):
                ended.add_metric([exporter, fate], count)
        return [pending, ended]


def _name(thing: str, unit: str | None) -> str:
    if not _THING.fullmatch(thing) or thing.startswith("halfmoon"):
        raise ValueError(
            f"metric thing {thing!r} must be lower-case words joined by underscores, without the halfmoon_ prefix"
        )
    if thing.endswith("_total"):
        raise ValueError(f"metric thing {thing!r} must not end in _total: counters get it by themselves")
    if unit is None:
        return f"halfmoon_{thing}"
    if unit not in UNITS:
        raise ValueError(f"metric unit {unit!r} is not a base unit; use one of {', '.join(UNITS)}, or none")
    return f"halfmoon_{thing}_{unit}"
