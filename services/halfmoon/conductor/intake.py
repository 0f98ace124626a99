"""Reading what was submitted: bytes and headers to a request with nothing left open, or to a refusal.

The same bytes give the same request, wherever and however often they are read: an id or seed that the submitter left
out is derived from the message, so that a conductor that gets it redelivered finds what another one began.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from halfmoon.bus.codec import Decoder, detect_encoding
from halfmoon.bus.errors import BadSubject, Undecodable
from halfmoon.bus.matching import check_subject
from halfmoon.bus.protocol import BusMessage
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import ModelName, RequestId
from halfmoon.schemas.requests import ConductorInbox, Encoding, RequestCancel, RequestSubmitted
from halfmoon.schemas.wire import HEADER_DEADLINE, HEADER_REPLY, Error, ErrorCode
from halfmoon.tracing import Context, extract

MAX_ID_CHARACTERS = 256
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request as it will be served."""

    request_id: RequestId
    model: ModelName
    body: RequestSubmitted
    reply: str
    encoding: Encoding
    deadline_ns: int
    seed: int
    context: Context
    """The submitter's trace; an empty context where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """What can't be served, whatever the state of the cluster."""

    error: Error
    request_id: RequestId
    """Empty where it can't be read either."""
    reply: str | None
    """None: there is nobody to tell."""
    encoding: Encoding


class _Address(msgspec.Struct):
    """What is still worth reading of a message that is no request."""

    type: str | None = None
    request_id: str | None = None
    reply: str | None = None


class Reader:
    """Decodes submissions. `default_timeout_s` is the deadline of those without one."""

    def __init__(self, default_timeout_s: float) -> None:
        self._default_timeout_ns = int(default_timeout_s * _NS_PER_S)
        self._inbox: Decoder[RequestSubmitted | RequestCancel] = Decoder(ConductorInbox)
        self._submitted: Decoder[RequestSubmitted] = Decoder(RequestSubmitted)
        self._address: Decoder[_Address] = Decoder(_Address)

    def read(self, message: BusMessage, *, stream_seq: int, now_ns: int) -> Submission | RequestCancel | Refused:
        headers = {name.lower(): value for name, value in message.headers.items()}
        encoding = detect_encoding(message.data, headers)
        try:
            body = self.decode(message.data, headers)
        except Undecodable as error:
            address = self._address_of(message.data, headers)
            return Refused(
                error=Error(code=ErrorCode.INVALID_MESSAGE, message=str(error)),
                request_id=RequestId(address.request_id or ""),
                reply=_publishable(headers.get(HEADER_REPLY) or address.reply),
                encoding=encoding,
            )
        if isinstance(body, RequestCancel):
            return body
        encoding = body.encoding or encoding
        reply = _publishable(headers.get(HEADER_REPLY) or body.reply)
        request_id = body.request_id if body.request_id is not None else _derived_id(message, stream_seq)
        wrong = _wrong(body, headers)
        if wrong is not None or reply is None:
            return Refused(
                error=wrong or _no_reply(),
                request_id=RequestId(request_id[:MAX_ID_CHARACTERS]),
                reply=reply,
                encoding=encoding,
            )
        given_ns = body.deadline_ns if body.deadline_ns is not None else _header_deadline_ns(headers)
        seed = body.sampling.seed
        return Submission(
            request_id=request_id,
            model=body.model or ModelName(subjects.untoken(message.subject.rsplit(".", 1)[-1])),
            body=body,
            reply=reply,
            encoding=encoding,
            deadline_ns=given_ns if given_ns is not None else now_ns + self._default_timeout_ns,
            seed=seed if seed is not None else _derived_seed(request_id),
            context=extract(headers),
        )

    def decode(self, data: bytes, headers: Mapping[str, str]) -> RequestSubmitted | RequestCancel:
        """A message without a type is a submission: people write `{"prompt": "…"}`. Raises `Undecodable`."""
        address = self._address_of(data, headers)
        return self._inbox.decode(data, headers) if address.type is not None else self._submitted.decode(data, headers)

    def _address_of(self, data: bytes, headers: Mapping[str, str]) -> _Address:
        try:
            return self._address.decode(data, headers)
        except Undecodable:
            return _Address()


def _no_reply() -> Error:
    return Error(
        code=ErrorCode.INVALID_REQUEST,
        message=f"no usable subject to reply to: name one in the header {HEADER_REPLY!r} or the field 'reply'",
    )


def _wrong(body: RequestSubmitted, headers: Mapping[str, str]) -> Error | None:
    if body.request_id is not None and not 0 < len(body.request_id) <= MAX_ID_CHARACTERS:
        return Error(
            code=ErrorCode.INVALID_REQUEST,
            message=f"request_id must have 1 to {MAX_ID_CHARACTERS} characters, got {len(body.request_id)}",
        )
    if body.deadline_ns is None and HEADER_DEADLINE in headers and _header_deadline_ns(headers) is None:
        return Error(
            code=ErrorCode.INVALID_REQUEST,
            message=f"the header {HEADER_DEADLINE!r} must be Unix time in nanoseconds, in decimal",
        )
    return None


def _header_deadline_ns(headers: Mapping[str, str]) -> int | None:
    text = headers.get(HEADER_DEADLINE, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def _publishable(subject: str | None) -> str | None:
    if not subject:
        return None
    try:
        check_subject(subject)
    except BadSubject:
        return None
    return subject


def _derived_id(message: BusMessage, stream_seq: int) -> RequestId:
    digest = hashlib.sha256(b"%d\0%s\0%s" % (stream_seq, message.subject.encode(), message.data)).hexdigest()
    return RequestId(f"req-{digest[:24]}")


def _derived_seed(request_id: RequestId) -> int:
    return int.from_bytes(hashlib.sha256(f"seed\0{request_id}".encode()).digest()[:8], "little", signed=True)
