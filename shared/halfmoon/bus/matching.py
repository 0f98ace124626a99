"""Subjects and headers: what is allowed, and which pattern matches which subject. The rules of NATS."""

import re
import secrets
from collections.abc import Mapping

from halfmoon.bus.errors import BadSubject, PayloadTooLarge

_BLANK = re.compile(r"[\s\x00-\x1f\x7f]")
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_HEADER_FRAME_BYTES = len("NATS/1.0\r\n") + len("\r\n")


def check_subject(subject: str) -> None:
    """Raises `BadSubject` unless one can publish to it: tokens joined by dots, no blanks, no wildcards."""
    tokens = check_pattern(subject)
    if "*" in tokens or ">" in tokens:
        raise BadSubject(f"{subject!r} has a wildcard, so it can be listened on but not published to")


def check_pattern(pattern: str) -> list[str]:
    """The tokens of a subject that may have wildcards. Raises `BadSubject`."""
    if _BLANK.search(pattern):
        raise BadSubject(f"{pattern!r} is no subject: it holds a blank or control character")
    tokens = pattern.split(".")
    for place, token in enumerate(tokens):
        if not token:
            raise BadSubject(f"{pattern!r} is no subject: a token between dots is empty")
        if token == ">" and place != len(tokens) - 1:
            raise BadSubject(f"{pattern!r} is no subject: '>' can only be the last token")
    return tokens


def check_queue(queue: str | None) -> None:
    if queue is not None and (not queue or _BLANK.search(queue)):
        raise BadSubject(f"{queue!r} is no queue group: it is empty or holds a blank")


def matches(pattern: str, subject: str) -> bool:
    """Whether `pattern` (`*`: one token, `>`: one or more at the end) covers `subject`."""
    if pattern == subject:
        return True
    wanted = pattern.split(".")
    given = subject.split(".")
    for place, token in enumerate(wanted):
        if token == ">":
            return len(given) > place
        if place >= len(given) or token not in ("*", given[place]):
            return False
    return len(wanted) == len(given)


def clean_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """A copy, as it will arrive. Raises `BadSubject` for names that aren't tokens and values with line breaks."""
    cleaned: dict[str, str] = {}
    for name, value in (headers or {}).items():
        if not _HEADER_NAME.fullmatch(name):
            raise BadSubject(f"{name!r} is no header name: letters, digits and '-' only")
        if "\r" in value or "\n" in value:
            raise BadSubject(f"the value of header {name!r} holds a line break")
        cleaned[name] = value.strip()
    return cleaned


def check_size(data: bytes, headers: Mapping[str, str], limit_bytes: int) -> None:
    """Raises `PayloadTooLarge`. Brokers count the headers in."""
    num_bytes = len(data)
    if headers:
        num_bytes += _HEADER_FRAME_BYTES
        num_bytes += sum(len(name) + len(value.encode()) + len(": \r\n") for name, value in headers.items())
    if num_bytes > limit_bytes:
        raise PayloadTooLarge(num_bytes, limit_bytes)


def new_inbox() -> str:
    return f"_INBOX.{secrets.token_hex(11)}"
