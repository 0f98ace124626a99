"""What one service owns of tracing: built once by `setup`, shut down once by its owner."""

import asyncio
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from halfmoon.tracing import attributes
from halfmoon.tracing.export import OtlpExporter, resolve_endpoint
from halfmoon.tracing.pipeline import Pipeline, PipelineStats
from halfmoon.tracing.spans import Tracer
from halfmoon.tracing.store import SQLiteExporter

_INSTRUMENTATION = "halfmoon"


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """Where spans go. With neither an endpoint nor a store they go nowhere, but context still travels."""

    otlp_endpoint: str | None = None
    """Base URL of an OTLP/HTTP collector; `OTEL_EXPORTER_OTLP_ENDPOINT` where absent."""
    otlp_timeout_s: float = 5.0
    sample_ratio: float = 1.0
    """Share of new traces that are recorded, 0 to 1. Decided once, at the root; children follow their parent."""
    store_path: Path | None = None
    """SQLite file of the local store, `<data dir>/traces.db`, shared by all services of the host. None: off."""
    store_max_spans: int = 200_000
    """About 1 kB each on disk."""
    node: str | None = None
    worker: str | None = None
    export_interval_s: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.sample_ratio <= 1.0:
            raise ValueError(f"sample_ratio is a share from 0 (no traces) to 1 (all), got {self.sample_ratio}")
        if self.store_max_spans < 1:
            raise ValueError(
                f"store_max_spans must be at least 1, got {self.store_max_spans}; to switch the store off, "
                "leave store_path out"
            )


class Telemetry:
    """A service's tracer and what exports its spans.

    1. `setup` builds it; the service passes `tracer` to its parts.
    2. `shutdown` (or `aclose`) exports what is pending, within its timeout, and stops the threads. Idempotent.
    3. Spans that end afterwards are counted as dropped, and harm nothing.
    """

    def __init__(self, service_name: str, provider: TracerProvider, pipelines: tuple[Pipeline, ...]) -> None:
        self.service_name = service_name
        self._provider = provider
        self._pipelines = pipelines
        self._closing = threading.Lock()
        self._closed = False
        self.tracer = Tracer(provider.get_tracer(_INSTRUMENTATION))

    def stats(self) -> dict[str, PipelineStats]:
        """By exporter: `otlp`, `store`."""
        return {pipeline.name: pipeline.stats() for pipeline in self._pipelines}

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until what has ended so far is exported (or has failed). Blocks; use `asyncio.to_thread` on a loop."""
        deadline = time.monotonic() + timeout_s
        flushed = [p.force_flush(int(max(0.0, deadline - time.monotonic()) * 1000)) for p in self._pipelines]
        return all(flushed)

    def shutdown(self, timeout_s: float = 5.0) -> bool:
        """Flush and stop, within about `timeout_s`. True when every span was handed over (or had failed)."""
        with self._closing:
            if self._closed:
                return True
            self._closed = True
            deadline = time.monotonic() + timeout_s
            # The store first: it is local and quick, and must not pay for a collector that hangs.
            closed = [p.close(max(0.0, deadline - time.monotonic())) for p in self._pipelines]
            return all(closed)

    async def aclose(self, timeout_s: float = 5.0) -> bool:
        """`shutdown` without blocking the event loop."""
        return await asyncio.to_thread(self.shutdown, timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()


def setup(
    service_name: str, config: TelemetryConfig | None = None, *, exporters: dict[str, SpanExporter] | None = None
) -> Telemetry:
    """Build a service's telemetry. `exporters` adds more, by name (an in-memory one, in tests).

    Raises `ValueError` for a malformed endpoint. An unreachable collector or unwritable store is not an error here:
    it is warned of once and counted when the first spans are exported.
    """
    config = config or TelemetryConfig()
    chosen: dict[str, SpanExporter] = {}
    if config.store_path is not None:
        chosen["store"] = SQLiteExporter(config.store_path, config.store_max_spans)
    endpoint = resolve_endpoint(config.otlp_endpoint)
    if endpoint is not None:
        chosen["otlp"] = OtlpExporter(endpoint, config.otlp_timeout_s)
    chosen.update(exporters or {})

    resource = {"service.name": service_name, "service.namespace": "halfmoon"}
    if config.node is not None:
        resource[attributes.NODE] = config.node
    if config.worker is not None:
        resource[attributes.WORKER] = config.worker
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
        resource=Resource(resource),
        shutdown_on_exit=False,
        span_limits=SpanLimits(max_span_attribute_length=1024, max_events=128, max_links=128),
    )
    pipelines = tuple(
        Pipeline(exporter, name, interval_s=config.export_interval_s) for name, exporter in chosen.items()
    )
    for pipeline in pipelines:
        provider.add_span_processor(pipeline)
    return Telemetry(service_name, provider, pipelines)
