"""OTLP over HTTP, for Jaeger or any OpenTelemetry collector, made safe for a service whose collector may be down."""

import logging
import os
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit, urlunsplit

from opentelemetry.exporter.otlp.proto.http import trace_exporter as otlp
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

ENV_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
ENV_TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_TRACES_PATH = "/v1/traces"

_log = logging.getLogger(__name__)


def resolve_endpoint(configured: str | None, environ: Mapping[str, str] | None = None) -> str | None:
    """The full URL that spans are posted to, or None when there is no collector.

    Our setting first, then the standard variables. A base URL (no path) gets `/v1/traces`, as OTLP says.
    Raises `ValueError` when what was given is not an http(s) URL.
    """
    environ = os.environ if environ is None else environ
    if exact := environ.get(ENV_TRACES_ENDPOINT):
        base, is_exact = exact, True
    else:
        base, is_exact = environ.get(ENV_ENDPOINT, ""), False
    if configured:
        base, is_exact = configured, False
    if not base:
        return None
    url = urlsplit(base)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(
            f"the OTLP endpoint {base!r} is not an http(s) URL; give the collector's OTLP/HTTP address, "
            "such as http://127.0.0.1:4318"
        )
    path = url.path.rstrip("/")
    if not is_exact and not path.endswith(_TRACES_PATH):
        path += _TRACES_PATH
    return urlunsplit((url.scheme, url.netloc, path, url.query, ""))


class OtlpExporter(SpanExporter):
    """Posts batches to `endpoint`; retries for `timeout_s` at most, then counts them as lost.

    Says once that the collector can't be reached, and once that it can be again; the library's own line per failed
    attempt is muted. Called only by a `Pipeline`'s thread.
    """

    def __init__(self, endpoint: str, timeout_s: float = 5.0) -> None:
        self.endpoint = endpoint
        self._exporter = otlp.OTLPSpanExporter(endpoint=endpoint, timeout=timeout_s)
        self._failing = False
        self._closed = False
        logging.getLogger(otlp.__name__).setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._failing:
                _log.info("the OTLP collector at %s takes spans again", self.endpoint)
            self._failing = False
        elif not self._failing and not self._closed:
            self._failing = True
            _log.warning(
                "no spans reach the OTLP collector at %s; they are dropped and counted until it answers. Start it "
                "(`docker compose up jaeger`), correct the endpoint, or unset it. Serving is not affected",
                self.endpoint,
            )
        return result

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """True: nothing is kept here."""
        return True

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._exporter.shutdown()  # type: ignore[no-untyped-call]
