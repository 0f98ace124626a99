"""Spans: a thin wrapper around an OpenTelemetry tracer that knows our rules.

- The current span follows contextvars: a task started inside a span has it as its parent.
- An exception that leaves a span is recorded as its status, with type and message, and goes on. Stack traces are not
  recorded: they belong in the log.
- What is known only afterwards (a chunk's transfer) is recorded whole, with explicit times, by `record_span`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode

from halfmoon.tracing import context as trace_context
from halfmoon.tracing.attributes import ERROR_TYPE, Attributes

_MAX_ERROR_CHARACTERS = 500


class Tracer:
    """Makes spans. Built by `setup`, or by `noop_tracer` where nobody listens; handed to its users, never global."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    @contextmanager
    def span(
        self,
        name: str,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        parent: Context | None = None,
        attributes: Attributes | None = None,
        links: Sequence[Link] = (),
    ) -> Iterator[Span]:
        """A span around a block, current inside it. `parent` None: the current span; `Context()`: a new root."""
        span = self.start_span(name, kind=kind, parent=parent, attributes=attributes, links=links)
        try:
            with trace_context.attached(trace.set_span_in_context(span, parent)):
                yield span
        except BaseException as error:
            record_error(span, error)
            raise
        finally:
            span.end()

    def start_span(
        self,
        name: str,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        parent: Context | None = None,
        attributes: Attributes | None = None,
        links: Sequence[Link] = (),
        start_ns: int | None = None,
    ) -> Span:
        """A span that its caller must `end()`, for lives that no block encloses. Not made current."""
        return self._tracer.start_span(
            name, context=parent, kind=kind, attributes=attributes, links=links, start_time=start_ns
        )

    def record_span(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        *,
        parent: Context | None = None,
        attributes: Attributes | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[Link] = (),
        error: BaseException | None = None,
    ) -> SpanContext:
        """A span that is over already. Times are Unix nanoseconds (`time.time_ns()`); an end before the start is
        moved to the start, since clocks of two hosts differ."""
        span = self.start_span(name, kind=kind, parent=parent, attributes=attributes, links=links, start_ns=start_ns)
        if error is not None:
            record_error(span, error)
        span.end(max(start_ns, end_ns))
        return span.get_span_context()


def record_error(span: Span, error: BaseException | str, error_type: str | None = None) -> None:
    """Mark a span as failed: status `error` with `type: message`, and `error.type`.

    `error` may be a message alone (an `Error` from a peer); `error_type` is then its code.
    """
    if isinstance(error, BaseException):
        error_type = error_type or type(error).__qualname__
    kind = error_type or "error"
    message = str(error)[:_MAX_ERROR_CHARACTERS]
    span.set_status(Status(StatusCode.ERROR, f"{kind}: {message}" if message else kind))
    span.set_attribute(ERROR_TYPE, kind)


def noop_tracer() -> Tracer:
    """A tracer that records nothing and passes a parent's context on unchanged."""
    return Tracer(trace.NoOpTracer())
