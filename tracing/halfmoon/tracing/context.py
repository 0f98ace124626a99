"""W3C trace context in message headers (https://www.w3.org/TR/trace-context/).

A sender calls `inject(headers)` inside its span; the receiver passes `extract(headers)` as the `parent` of its own
span, or runs a block under it with `attached(…)`.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

HEADER_TRACEPARENT = "traceparent"
HEADER_TRACESTATE = "tracestate"


def inject(headers: MutableMapping[str, str], context: Context | None = None) -> None:
    """Write the context (the current one unless given) into `headers`. Writes nothing where there is no span."""
    TraceContextTextMapPropagator().inject(headers, context=context)


def extract(headers: Mapping[str, str] | None) -> Context:
    """The sender's context; an empty one, so a new root, where the headers hold none or nonsense.

    Never the current context: a message handler must not become the child of whatever span happens to be open.
    Header names are compared without case, since HTTP proxies and NATS clients capitalise them.
    """
    lowered = {name.lower(): value for name, value in (headers or {}).items()}
    carrier = {name: lowered[name] for name in (HEADER_TRACEPARENT, HEADER_TRACESTATE) if name in lowered}
    return TraceContextTextMapPropagator().extract(carrier, context=Context())


def current() -> Context:
    """The context of the running code, to hand to a task, thread or callback that outlives it."""
    return otel_context.get_current()


def context_of(span: trace.Span | trace.SpanContext) -> Context:
    """A context whose only content is this span: the `parent` for spans recorded later."""
    if isinstance(span, trace.SpanContext):
        span = trace.NonRecordingSpan(span)
    return trace.set_span_in_context(span, Context())


@contextmanager
def attached(context: Context) -> Iterator[None]:
    """Run the block with `context` as the current one. Follows contextvars, so it holds across awaits."""
    token = otel_context.attach(context)
    try:
        yield
    finally:
        otel_context.detach(token)


def span_context(context: Context | None = None) -> trace.SpanContext | None:
    """The span named by a context (the current one unless given), or None where there is none."""
    found = trace.get_current_span(context).get_span_context()
    return found if found.is_valid else None


def trace_id_of(context: Context | None = None) -> str | None:
    """The trace id as 32 hex digits, as Jaeger shows it."""
    found = span_context(context)
    return trace.format_trace_id(found.trace_id) if found is not None else None


def traceparent(context: Context | None = None) -> str | None:
    """The context as one string, to be kept with a chunk so that its later life can link back."""
    headers: dict[str, str] = {}
    inject(headers, context)
    return headers.get(HEADER_TRACEPARENT)


def link_to(traceparent_value: str | None) -> tuple[trace.Link, ...]:
    """The link to what `traceparent` wrote down, as a tuple for `links=`; empty where there is none to make."""
    if traceparent_value is None:
        return ()
    found = span_context(extract({HEADER_TRACEPARENT: traceparent_value}))
    return (trace.Link(found),) if found is not None else ()
