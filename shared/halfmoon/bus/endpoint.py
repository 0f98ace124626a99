"""Typed messages over a bus: what services use.

    serve      answer requests            call       ask, and get the typed answer or `RemoteError`
    announce   tell who listens           submit     store in a stream
    take_work  share a work queue         read_stream  follow a stream, in order

Each message carries its deadline and trace context in headers. Whatever the bytes, a receiver goes on: an undecodable
message is answered with a typed error where somebody waits, counted, and done with.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import TypeVar

import structlog

from halfmoon.bus.codec import CONTENT_TYPE_JSON, Decoder, detect_encoding, encode
from halfmoon.bus.errors import (
    BusError,
    BusTimeout,
    NoResponders,
    PayloadTooLarge,
    RemoteError,
    Undecodable,
)
from halfmoon.bus.protocol import (
    DEFAULT_MAX_PENDING,
    Bus,
    BusMessage,
    Delivery,
    EndpointRecord,
    GapHandler,
    Settlement,
    Subscription,
)
from halfmoon.schemas.requests import Encoding
from halfmoon.schemas.wire import HEADER_CONTENT_TYPE, HEADER_DEADLINE, HEADER_REPLY, Error, ErrorCode, Message
from halfmoon.tracing import Context, attached, extract, inject

M = TypeVar("M")
R = TypeVar("R")

_log = structlog.stdlib.get_logger(__name__)

_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Envelope:
    """What came with a message."""

    subject: str
    headers: Mapping[str, str]
    reply: str | None
    """Where answers go: the header `halfmoon-reply`, else the message's own reply subject."""
    deadline_ns: int | None
    """Unix nanoseconds; nobody waits any longer."""
    context: Context
    """The sender's trace context: the parent of the receiver's spans, and the current one while its handler runs."""
    encoding: Encoding
    """How it was written, so how its answer is to be."""

    def remaining_s(self, now_ns: int | None = None) -> float | None:
        """Time until the deadline, not below 0; None where there is none."""
        if self.deadline_ns is None:
            return None
        return max(0.0, (self.deadline_ns - (time.time_ns() if now_ns is None else now_ns)) / _NS_PER_S)

    def is_expired(self, now_ns: int | None = None) -> bool:
        return self.remaining_s(now_ns) == 0.0


@dataclass(slots=True)
class EndpointCounts:
    """What became of the messages of one endpoint."""

    handled: int = 0
    refused: int = 0
    """Answered with a typed error by the handler."""
    failed: int = 0
    """The handler raised something else: a defect."""
    undecodable: int = 0
    expired: int = 0
    """Not handled, because the deadline had passed."""


@dataclass(slots=True)
class Endpoint:
    """A served subject. `subscription` ends it."""

    subscription: Subscription
    counts: EndpointCounts = field(default_factory=EndpointCounts)

    async def drain(self, timeout_s: float = 10.0) -> None:
        await self.subscription.drain(timeout_s)

    async def unsubscribe(self) -> None:
        await self.subscription.unsubscribe()


def _as_is(error: Error) -> Message:
    return error


async def serve(
    bus: Bus,
    subject: str,
    inbox_type: type[M] | UnionType,
    handler: Callable[[M, Envelope], Awaitable[Message | None]],
    *,
    queue: str | None = None,
    concurrency: int = 1,
    max_pending: int = DEFAULT_MAX_PENDING,
    record: EndpointRecord | None = None,
    as_reply: Callable[[Error], Message] = _as_is,
) -> Endpoint:
    """Hand each message on `subject` to `handler`, and answer with what it returns.

    Refusals: the handler raises `RemoteError`; anything else that it raises is logged and answered with `internal`.
    `as_reply` wraps errors where callers expect another message. `record` counts in the services API.
    """
    decoder: Decoder[M] = Decoder(inbox_type)
    counts = EndpointCounts()

    async def receive(message: BusMessage) -> None:
        started_ns = time.perf_counter_ns()
        envelope = open_envelope(message)
        reply: Message | None
        try:
            reply = await _handle(decoder, message, envelope, handler)
            counts.handled += 1
            problem = None
        except Exception as error:
            problem = error_of(error)
            _count(counts, error, envelope)
            reply = as_reply(problem)
        try:
            await _answer(bus, envelope, reply, as_reply)
        finally:
            if record is not None:
                record.count(time.perf_counter_ns() - started_ns, f"{problem.code}" if problem is not None else None)

    subscription = await bus.subscribe(subject, receive, queue=queue, concurrency=concurrency, max_pending=max_pending)
    return Endpoint(subscription, counts)


async def call(
    bus: Bus,
    subject: str,
    message: Message,
    reply_type: type[R],
    *,
    timeout_s: float,
    deadline_ns: int | None = None,
    headers: Mapping[str, str] | None = None,
    encoding: Encoding = Encoding.MSGPACK,
) -> R:
    """Ask, and return the answer; waits no longer than `timeout_s`, nor past `deadline_ns`.

    Raises `RemoteError` where the other side refuses, `BusTimeout`, `NoResponders`, and `Undecodable` where the answer
    is something else.
    """
    now_ns = time.time_ns()
    timeout_ns = int(timeout_s * _NS_PER_S)
    end_ns = now_ns + timeout_ns if deadline_ns is None else min(deadline_ns, now_ns + timeout_ns)
    if end_ns <= now_ns:
        raise BusTimeout(subject, 0.0)
    reply = await bus.request(
        subject,
        encode(message, encoding),
        timeout_s=(end_ns - now_ns) / _NS_PER_S,
        headers=seal(headers, deadline_ns=end_ns, encoding=encoding),
    )
    answer = _reply_decoder(reply_type).decode(reply.data, reply.headers)
    if isinstance(answer, Error):
        raise RemoteError(answer)
    return answer


async def announce(
    bus: Bus,
    subject: str,
    message: Message,
    *,
    deadline_ns: int | None = None,
    headers: Mapping[str, str] | None = None,
    encoding: Encoding = Encoding.MSGPACK,
    reply: str | None = None,
) -> None:
    """Tell whoever listens now."""
    sealed = seal(headers, deadline_ns=deadline_ns, encoding=encoding)
    await bus.publish(subject, encode(message, encoding), headers=sealed, reply=reply)


async def submit(
    bus: Bus,
    subject: str,
    message: Message,
    *,
    msg_id: str | None = None,
    timeout_s: float = 5.0,
    deadline_ns: int | None = None,
    headers: Mapping[str, str] | None = None,
    reply: str | None = None,
) -> int:
    """Store a message in the stream that captures `subject`; its sequence. `reply` travels as `halfmoon-reply`."""
    sealed = seal(headers, deadline_ns=deadline_ns)
    if reply is not None:
        sealed[HEADER_REPLY] = reply
    return await bus.stream_publish(subject, encode(message), headers=sealed, msg_id=msg_id, timeout_s=timeout_s)


async def take_work(
    bus: Bus,
    stream: str,
    durable: str,
    filter_subject: str,
    inbox_type: type[M] | UnionType,
    handler: Callable[[M, Delivery, Envelope], Awaitable[None]],
    *,
    ack_wait_s: float = 30.0,
    max_outstanding: int = 64,
    as_reply: Callable[[Error], Message] = _as_is,
) -> Endpoint:
    """Typed `Bus.consume`: the handler settles its delivery. The undecodable is answered and never comes again."""
    decoder: Decoder[M] = Decoder(inbox_type)
    counts = EndpointCounts()

    async def receive(delivery: Delivery) -> None:
        envelope = open_envelope(delivery.message)
        try:
            message = decoder.decode(delivery.data, delivery.headers)
        except Undecodable as error:
            _count(counts, error, envelope)
            await delivery.term()
            await _answer(bus, envelope, as_reply(error_of(error)), as_reply)
            return
        with attached(envelope.context):
            await handler(message, delivery, envelope)
        counts.handled += 1

    subscription = await bus.consume(
        stream, durable, filter_subject, receive, ack_wait_s=ack_wait_s, max_outstanding=max_outstanding
    )
    return Endpoint(subscription, counts)


async def acknowledge(bus: Bus, receipt: str) -> None:
    """Settle a delivery of a work queue for whoever has it by now: see `Delivery.receipt`."""
    await bus.publish(receipt, Settlement.ACK.value.encode())


async def read_stream(
    bus: Bus,
    stream: str,
    inbox_type: type[M] | UnionType,
    handler: Callable[[int, M], Awaitable[None]],
    *,
    start_seq: int,
    on_gap: GapHandler,
    filter_subject: str | None = None,
) -> Endpoint:
    """Typed `Bus.follow`: the handler gets the sequence and the message. The undecodable is logged and skipped."""
    decoder: Decoder[M] = Decoder(inbox_type)
    counts = EndpointCounts()

    async def receive(seq: int, message: BusMessage) -> None:
        try:
            event = decoder.decode(message.data, message.headers)
        except Undecodable as error:
            _count(counts, error, open_envelope(message))
            return
        await handler(seq, event)
        counts.handled += 1

    subscription = await bus.follow(stream, receive, start_seq=start_seq, on_gap=on_gap, filter_subject=filter_subject)
    return Endpoint(subscription, counts)


def seal(
    headers: Mapping[str, str] | None = None,
    *,
    deadline_ns: int | None = None,
    encoding: Encoding = Encoding.MSGPACK,
) -> dict[str, str]:
    """Headers for a message that is sent now: those given, the deadline, and the current trace context."""
    sealed: dict[str, str] = {}
    inject(sealed)
    sealed.update(headers or {})
    if deadline_ns is not None:
        sealed[HEADER_DEADLINE] = str(deadline_ns)
    if encoding is Encoding.JSON:
        sealed[HEADER_CONTENT_TYPE] = CONTENT_TYPE_JSON
    return sealed


def open_envelope(message: BusMessage) -> Envelope:
    """What came with `message`. A deadline that isn't a number counts as none."""
    headers = {name.lower(): value for name, value in message.headers.items()}
    deadline = headers.get(HEADER_DEADLINE, "")
    return Envelope(
        subject=message.subject,
        headers=headers,
        reply=headers.get(HEADER_REPLY) or message.reply,
        deadline_ns=int(deadline) if deadline.isascii() and deadline.isdigit() and len(deadline) < 20 else None,
        context=extract(headers),
        encoding=detect_encoding(message.data, headers),
    )


def error_of(error: Exception) -> Error:
    """The typed error that tells a caller about an exception, without its inner life."""
    match error:
        case RemoteError():
            return error.error
        case Undecodable():
            return Error(code=ErrorCode.INVALID_MESSAGE, message=str(error))
        case NoResponders() | BusTimeout() | BusError():
            return Error(code=ErrorCode.UNAVAILABLE, message=str(error))
        case TimeoutError():
            return Error(code=ErrorCode.DEADLINE, message="the work was not done in time")
        case _:
            return Error(code=ErrorCode.INTERNAL, message="an internal error; the service's log has the details")


async def _handle(
    decoder: Decoder[M],
    message: BusMessage,
    envelope: Envelope,
    handler: Callable[[M, Envelope], Awaitable[Message | None]],
) -> Message | None:
    if envelope.is_expired():
        raise _Expired(
            Error(code=ErrorCode.DEADLINE, message=f"the deadline passed before {envelope.subject!r} was handled")
        )
    decoded = decoder.decode(message.data, message.headers)
    with attached(envelope.context):
        return await handler(decoded, envelope)


class _Expired(RemoteError):
    """Raised before the handler is called."""


def _count(counts: EndpointCounts, error: Exception, envelope: Envelope) -> None:
    match error:
        case Undecodable():
            counts.undecodable += 1
            _log.warning("undecodable message", subject=envelope.subject, error=str(error))
        case _Expired():
            counts.expired += 1
        case RemoteError():
            counts.refused += 1
        case _:
            counts.failed += 1
            _log.error("a message handler failed", subject=envelope.subject, exc_info=error)


async def _answer(bus: Bus, envelope: Envelope, reply: Message | None, as_reply: Callable[[Error], Message]) -> None:
    if reply is None or envelope.reply is None:
        return
    headers = seal(encoding=envelope.encoding)
    try:
        await bus.publish(envelope.reply, encode(reply, envelope.encoding), headers=headers)
    except PayloadTooLarge as error:
        refusal = as_reply(Error(code=ErrorCode.INTERNAL, message=f"the answer can't be sent: {error}"))
        await bus.publish(envelope.reply, encode(refusal, envelope.encoding), headers=headers)


def _reply_decoder(reply_type: type[R]) -> Decoder[R | Error]:
    either: UnionType | type[Error] = reply_type | Error
    return Decoder(either)
