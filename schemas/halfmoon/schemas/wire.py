"""What every message shares: the base struct, headers, and the typed error."""

from enum import StrEnum

import msgspec

HEADER_REPLY = "halfmoon-reply"
"""Reply subject for token events. JetStream overwrites the NATS reply of what it captures, so it travels here."""

HEADER_DEADLINE = "halfmoon-deadline"
"""Unix nanoseconds, in decimal, after which nobody waits for the answer any more."""

HEADER_CONTENT_TYPE = "content-type"
"""`application/json` or `application/msgpack`; without it the first byte decides (`{` is JSON)."""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages. New fields only with defaults: an old reader then still understands a new writer."""


class ErrorCode(StrEnum):
    """Why something was refused or failed. The gateway maps each to one HTTP status."""

    INVALID_MESSAGE = "invalid_message"
    INVALID_REQUEST = "invalid_request"
    PROMPT_TOO_LONG = "prompt_too_long"
    MODEL_NOT_FOUND = "model_not_found"
    NO_WORKERS = "no_workers"
    OVERLOADED = "overloaded"
    BUSY = "busy"
    NO_SPACE = "no_space"
    STALE = "stale"
    """The slot or lease named is not (or no longer) what the caller holds: expired, reused, other epoch."""
    DEADLINE = "deadline_exceeded"
    CANCELLED = "cancelled"
    WORKER_LOST = "worker_lost"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"


class Error(Message, frozen=True, tag="error.v1"):
    """A typed refusal or failure. `message` says what was wrong and what to do; it never holds prompt text."""

    code: ErrorCode
    message: str
    retry_after_s: float | None = None
