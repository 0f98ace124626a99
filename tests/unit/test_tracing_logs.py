"""Logs: ids on every line, no secrets, no prompt text, one way out."""

import json
import logging
from collections.abc import Iterator
from io import StringIO

import pytest
import structlog
from opentelemetry.trace import format_span_id, format_trace_id

from halfmoon.tracing import TelemetryConfig, setup
from halfmoon.tracing.logs import bound_request, configure_logs


class Log:
    """A configured log whose lines can be read back."""

    def __init__(self) -> None:
        self.stream = StringIO()

    def configure(self, level: str = "info", log_format: str = "json") -> None:
        configure_logs("prefill", level=level, log_format=log_format, stream=self.stream)

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.text.splitlines()]


@pytest.fixture
def log() -> Iterator[Log]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield Log()
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def test_a_line_has_service_ids_and_fields(log: Log) -> None:
    log.configure()
    telemetry = setup("prefill", TelemetryConfig())
    with telemetry.tracer.span("work") as span, bound_request("req-1"):
        structlog.get_logger("halfmoon.prefill").info("chunk committed", index=3, num_bytes=1024)
    structlog.get_logger("halfmoon.prefill").info("idle")
    telemetry.shutdown()
    inside, outside = log.lines()
    context = span.get_span_context()
    assert inside.pop("timestamp") is not None
    assert inside == {
        "event": "chunk committed",
        "level": "info",
        "logger": "halfmoon.prefill",
        "service": "prefill",
        "request_id": "req-1",
        "trace_id": format_trace_id(context.trace_id),
        "span_id": format_span_id(context.span_id),
        "index": 3,
        "num_bytes": 1024,
    }
    assert not {"request_id", "trace_id", "span_id"} & outside.keys()


def test_standard_library_goes_the_same_way(log: Log) -> None:
    log.configure()
    with bound_request("req-1"):
        logging.getLogger("uvicorn.error").warning("%s workers, %s", 2, "nats://u:hunter2@h", extra={"api_key": "k"})
    (line,) = log.lines()
    assert line["event"] == "2 workers, nats://[redacted]@h"
    assert (line["logger"], line["level"], line["request_id"]) == ("uvicorn.error", "warning", "req-1")
    assert line["api_key"] == "[redacted]"


def test_secrets_never_appear(log: Log) -> None:
    log.configure()
    secret = "hunter2-hunter2"
    structlog.get_logger("test").info(
        f"connecting to nats://halfmoon:{secret}@127.0.0.1:4222 with Bearer {secret}",
        api_key=secret,
        Authorization=f"Bearer {secret}",
        transport_secret=secret.encode(),
        session_token=secret,
        password=secret,
        headers={"authorization": secret, "x": [{"deep_secret": secret}]},
        tokens_seen=12,
        tokenizer="llama",
        cause=ValueError(f"http://u:{secret}@host refused"),
    )
    assert secret not in log.text
    (line,) = log.lines()
    assert line["event"] == "connecting to nats://[redacted]@127.0.0.1:4222 with Bearer [redacted]"
    assert line["tokens_seen"] == 12
    assert line["tokenizer"] == "llama"
    assert line["headers"] == {"authorization": "[redacted]", "x": [{"deep_secret": "[redacted]"}]}
    assert line["cause"] == "ValueError: http://[redacted]@host refused"


def test_prompt_text_never_appears(log: Log) -> None:
    log.configure()
    prompt = "tell me about half moons"
    structlog.get_logger("test").info(
        "submitted",
        prompt=prompt,
        messages=[{"role": "user", "content": prompt}],
        request={"text": prompt, "model": "m"},
        tokens=(1, 2, 3),
        prompt_tokens=24,
    )
    assert prompt not in log.text
    (line,) = log.lines()
    assert line["prompt"] == f"[{len(prompt)} characters]"
    assert line["messages"] == "[1 items]"
    assert line["request"] == {"text": f"[{len(prompt)} characters]", "model": "m"}
    assert line["tokens"] == "[3 items]"
    assert line["prompt_tokens"] == 24


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_tracebacks_have_no_locals_and_no_credentials(log: Log, log_format: str) -> None:
    log.configure(log_format=log_format)
    local = "a prompt in a local variable"
    try:
        raise ConnectionError(f"nats://u:{'hunter2'}@host is down {len(local)}")
    except ConnectionError:
        structlog.get_logger("test").exception("broker lost")
    assert "ConnectionError: nats://[redacted]@host is down 28" in log.text
    assert "Traceback (most recent call last)" in log.text
    assert local not in log.text


def test_level_is_obeyed_by_both(log: Log) -> None:
    log.configure(level="warning")
    structlog.get_logger("a").info("quiet")
    logging.getLogger("b").info("quiet")
    structlog.get_logger("a").warning("loud")
    logging.getLogger("b").warning("loud")
    assert [line["event"] for line in log.lines()] == ["loud", "loud"]


def test_configuring_again_replaces(log: Log) -> None:
    log.configure(level="error")
    log.configure(level="debug")
    structlog.get_logger("a").debug("once")
    assert len(log.lines()) == 1


def test_auto_is_json_off_a_terminal_and_console_is_readable(log: Log) -> None:
    log.configure(log_format="auto")
    structlog.get_logger("a").info("as json")
    assert log.lines()[0]["event"] == "as json"
    log.configure(log_format="console")
    structlog.get_logger("a").info("for people", index=3)
    last = log.text.splitlines()[-1]
    assert "for people" in last
    assert "index=3" in last
    assert not last.startswith("{")


def test_unknown_settings_are_refused(log: Log) -> None:
    with pytest.raises(ValueError, match="log level 'loud' is unknown; use debug"):
        log.configure(level="loud")
    with pytest.raises(ValueError, match="log format 'xml' is unknown; use auto, json, console"):
        log.configure(log_format="xml")
