"""Traces, metrics and logs: what every service does so that one request can be followed through all of them."""

from opentelemetry.context import Context

from halfmoon.tracing.context import attached, context_of, current, extract, inject, link_to, traceparent
from halfmoon.tracing.spans import Tracer, noop_tracer, record_error
from halfmoon.tracing.telemetry import Telemetry, TelemetryConfig, setup

__all__ = [
    "Context",
    "Telemetry",
    "TelemetryConfig",
    "Tracer",
    "attached",
    "context_of",
    "current",
    "extract",
    "inject",
    "link_to",
    "noop_tracer",
    "record_error",
    "setup",
    "traceparent",
]
