"""Structured logs: one line per event, with the ids that tie it to a trace, and without secrets or prompt text.

    log = structlog.get_logger(__name__)
    with bound_request(request_id):
        log.info("split sent", worker=worker_id)

Lines of the standard library's loggers (ours in libraries, uvicorn's, nats') go the same way. Logging is the process's,
so `configure_logs` is called once, by a service's `__main__`.
"""

import logging
import re
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Any, Final, TextIO

import structlog
from opentelemetry import trace

from halfmoon.schemas.ids import RequestId
from halfmoon.tracing import context as trace_context

REDACTED: Final = "[redacted]"
_SECRET_NAME = re.compile(r"secret|passw(or)?d|api_?key|authorization|credential|cookie|token(?!iz)", re.IGNORECASE)
_TEXT_NAMES: Final = frozenset(
    {"prompt", "prompts", "messages", "content", "text", "completion", "tokens", "token_ids", "prompt_tokens_ids"}
)
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+@")
_BEARER = re.compile(r"(?i)\b(bearer\s+)[^\s,;\"']+")
_MAX_DEPTH = 6

# structlog fixes this signature; event dictionaries hold whatever a caller logs.
EventDict = MutableMapping[str, Any]


class LogFormat(StrEnum):
    AUTO = "auto"
    """Console on a terminal, JSON elsewhere."""
    JSON = "json"
    CONSOLE = "console"


def configure_logs(
    service: str, *, level: str = "info", log_format: LogFormat | str = LogFormat.AUTO, stream: TextIO | None = None
) -> None:
    """Send structlog's and the standard library's events of `level` and above to `stream` (stderr unless given).

    Replaces what was configured before. Raises `ValueError` for an unknown level or format.
    """
    out = sys.stderr if stream is None else stream
    if log_format not in list(LogFormat):
        raise ValueError(f"log format {log_format!r} is unknown; use {', '.join(LogFormat)}")
    chosen = LogFormat(log_format)
    threshold = logging.getLevelNamesMapping().get(level.upper())
    if threshold is None:
        raise ValueError(f"log level {level!r} is unknown; use debug, info, warning, error or critical")
    console = chosen is LogFormat.CONSOLE or (chosen is LogFormat.AUTO and out.isatty())

    def add_service(_logger: object, _method: str, event: EventDict) -> EventDict:
        event["service"] = service
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_service,
        add_trace_ids,
        structlog.processors.StackInfoRenderer(),
        # Tracebacks as plain text, before redaction and without local variables: those would hold prompts.
        structlog.processors.format_exc_info,
        redact,
    ]
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback)
        if console
        else structlog.processors.JSONRenderer(ensure_ascii=False, default=str)
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared[:-2], structlog.stdlib.ExtraAdder(), *shared[-2:]],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(threshold)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def bound_request(request_id: RequestId | str) -> AbstractContextManager[None]:
    """Put `request_id` on every line logged inside the block, and in tasks started there."""
    return structlog.contextvars.bound_contextvars(request_id=request_id)


def add_trace_ids(_logger: object, _method: str, event: EventDict) -> EventDict:
    """structlog processor: `trace_id` and `span_id` of the current span, in hex, where there is one."""
    span = trace_context.span_context()
    if span is not None:
        event.setdefault("trace_id", trace.format_trace_id(span.trace_id))
        event.setdefault("span_id", trace.format_span_id(span.span_id))
    return event


def redact(_logger: object, _method: str, event: EventDict) -> EventDict:
    """structlog processor: no secrets, no prompt text, at any depth.

    - Strings under names like `api_key`, `authorization`, `*secret*`, `*token*` become `[redacted]`; numbers under such
      names stay, since `prompt_tokens=12` is a count.
    - Text and token ids under the names that requests use for them become their length.
    - Credentials in URLs, and bearer tokens, are cut out of every string.
    """
    for name in list(event):
        event[name] = _clean(name, event[name], 0)
    return event


def _clean(name: str, value: object, depth: int) -> object:
    if depth > _MAX_DEPTH:
        return "…"
    if name.lower() in _TEXT_NAMES and not isinstance(value, (bool, int, float, type(None))):
        return _length(value)
    if isinstance(value, (str, bytes)):
        if _SECRET_NAME.search(name):
            return REDACTED
        return _scrub(value) if isinstance(value, str) else f"[{len(value)} bytes]"
    if isinstance(value, Mapping):
        return {key: _clean(str(key), inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_clean(name, inner, depth + 1) for inner in value]
    if isinstance(value, BaseException):
        return _scrub(f"{type(value).__qualname__}: {value}")
    return value


def _length(value: object) -> str:
    if isinstance(value, str):
        return f"[{len(value)} characters]"
    if isinstance(value, (Sequence, Mapping)):
        return f"[{len(value)} items]"
    return REDACTED


def _scrub(text: str) -> str:
    return _BEARER.sub(rf"\1{REDACTED}", _URL_CREDENTIALS.sub(f"{REDACTED}@", text))
