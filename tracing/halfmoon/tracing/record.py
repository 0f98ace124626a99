"""A finished span as plain data: what the local store keeps and the timeline reads."""

from dataclasses import dataclass, field

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import format_span_id, format_trace_id
from opentelemetry.util import types as otel_types

from halfmoon.tracing.attributes import NODE, REQUEST_ID, WORKER, Scalar

Value = Scalar | tuple[Scalar, ...]

_SERVICE_NAME = "service.name"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    name: str
    time_ns: int
    attributes: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRecord:
    trace_id: str
    span_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRecord:
    """Ids are lower-case hex (32 and 16 digits); times are Unix nanoseconds; `kind` and `status` are lower case."""

    trace_id: str
    span_id: str
    parent_span_id: str | None = None
    service: str = ""
    node: str = ""
    worker: str = ""
    """Service, node and worker are the recording process's; empty where it did not say."""
    name: str
    kind: str = "internal"
    start_ns: int
    end_ns: int
    status: str = "unset"
    status_message: str = ""
    attributes: dict[str, Value] = field(default_factory=dict)
    events: tuple[EventRecord, ...] = ()
    links: tuple[LinkRecord, ...] = ()

    @property
    def request_id(self) -> str | None:
        value = self.attributes.get(REQUEST_ID)
        return value if isinstance(value, str) else None

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def failed(self) -> bool:
        return self.status == "error"


def record_of(span: ReadableSpan) -> SpanRecord:
    """The record of an ended span. Raises `ValueError` for one without identity or end."""
    context = span.context
    if context is None or span.start_time is None or span.end_time is None:
        raise ValueError(f"span {span.name!r} has no context, start or end; export it after it has ended")
    resource = span.resource.attributes
    return SpanRecord(
        trace_id=format_trace_id(context.trace_id),
        span_id=format_span_id(context.span_id),
        parent_span_id=format_span_id(span.parent.span_id) if span.parent is not None else None,
        service=str(resource.get(_SERVICE_NAME, "")),
        node=str(resource.get(NODE, "")),
        worker=str(resource.get(WORKER, "")),
        name=span.name,
        kind=span.kind.name.lower(),
        start_ns=span.start_time,
        end_ns=span.end_time,
        status=span.status.status_code.name.lower(),
        status_message=span.status.description or "",
        attributes=_plain(span.attributes),
        events=tuple(
            EventRecord(name=event.name, time_ns=event.timestamp, attributes=_plain(event.attributes))
            for event in span.events
        ),
        links=tuple(
            LinkRecord(trace_id=format_trace_id(link.context.trace_id), span_id=format_span_id(link.context.span_id))
            for link in span.links
        ),
    )


def _plain(attributes: otel_types.Attributes) -> dict[str, Value]:
    return {name: _value(value) for name, value in (attributes or {}).items()}


def _value(value: object) -> Value:
    if isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(item if isinstance(item, (str, bool, int, float)) else str(item) for item in value)
    return str(value)
