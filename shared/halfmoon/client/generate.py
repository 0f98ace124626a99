"""Submit a prompt, read its tokens.

async with GenerateClient(bus) as client:
    async with aclosing(client.submit(request, deadline_ns=…)) as events:
        async for event in events: ...
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import msgspec
import structlog

from halfmoon.bus.codec import Decoder, encode
from halfmoon.bus.errors import (
    BusError,
    BusTimeout,
    NoStream,
    PayloadTooLarge,
    StreamFull,
    Undecodable,
)
from halfmoon.bus.protocol import Bus, BusMessage, ConnectionState, Subscription
from halfmoon.client.mailbox import Mailbox
from halfmoon.client.sequence import Sequence, TokensLost
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import RequestId, new_request_id
from halfmoon.schemas.requests import Failed, Finished, RequestCancel, RequestSubmitted, TokenEvent, Tokens
from halfmoon.schemas.wire import HEADER_DEADLINE, HEADER_REPLY, Error, ErrorCode
from halfmoon.tracing import Context, current, inject

MAX_WAITING_EVENTS = 4096
_PUBLISH_TIMEOUT_S = 5.0
_CANCEL_TIMEOUT_S = 1.0

_log = structlog.stdlib.get_logger(__name__)


class GenerateClient:
    """Any number of requests over one subscription. Use it as a context manager, or `start` and `close` it."""

    def __init__(self, bus: Bus, *, max_waiting_events: int = MAX_WAITING_EVENTS) -> None:
        self._bus = bus
        self._max_waiting_events = max_waiting_events
        self._inbox = bus.new_inbox()
        self._decoder: Decoder[TokenEvent] = Decoder(TokenEvent)
        self._open: dict[str, Mailbox] = {}
        self._subscription: Subscription | None = None
        self._unwatch: Callable[[], None] | None = None
        self.num_late = 0
        """Events that came for nobody: after a cancel, mostly."""

    @property
    def num_open(self) -> int:
        """Requests whose end hasn't been read."""
        return len(self._open)

    async def start(self) -> None:
        """Begin to listen. Raises what `Bus.subscribe` raises."""
        self._subscription = await self._bus.subscribe(f"{self._inbox}.*", self._on_event)
        self._unwatch = self._bus.watch_connection(self._on_connection)

    async def close(self) -> None:
        """End what is open with an error, and stop listening. Idempotent."""
        for mailbox in self._open.values():
            mailbox.end(ErrorCode.UNAVAILABLE, "the client is closed")
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        if self._subscription is not None:
            await self._subscription.unsubscribe()
            self._subscription = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    def submit(
        self, request: RequestSubmitted, *, deadline_ns: int, context: Context | None = None
    ) -> AsyncGenerator[TokenEvent, None]:
        """Token events in order, each token once; the last is exactly one `Finished` or `Failed`.

        Everything that goes wrong is a `Failed`: refused, lost, past `deadline_ns` (Unix time), or never sent. Closing
        the iterator before its end (or cancelling its reader) cancels the request. `context` is the trace to belong to;
        the current one unless given. Raises ValueError for a request without a model.
        """
        if request.model is None:
            raise ValueError("a request is submitted for a model; set RequestSubmitted.model")
        model, request_id = request.model, request.request_id or new_request_id()
        request = msgspec.structs.replace(request, request_id=request_id)
        headers = {HEADER_REPLY: f"{self._inbox}.{subjects.token(request_id)}", HEADER_DEADLINE: str(deadline_ns)}
        inject(headers, context or current())
        return self._run(request_id, subjects.request(model), request, headers, deadline_ns)

    async def cancel(self, request_id: RequestId, reason: str = "cancelled by the client") -> None:
        """Stop a request, wherever it is. A broker that is away is only logged: the deadline ends the request then."""
        try:
            async with asyncio.timeout(_CANCEL_TIMEOUT_S):
                await self._bus.publish(subjects.CANCEL, encode(RequestCancel(request_id=request_id, reason=reason)))
        except (BusError, TimeoutError) as error:
            _log.warning("a cancel could not be sent", request_id=request_id, error=str(error))

    async def _run(
        self, request_id: RequestId, subject: str, request: RequestSubmitted, headers: dict[str, str], deadline_ns: int
    ) -> AsyncGenerator[TokenEvent, None]:
        key = subjects.token(request_id)
        if key in self._open:
            raise ValueError(f"request {request_id} is open already; give each its own id")
        if self._subscription is None:
            raise RuntimeError("start the client before submitting")
        mailbox = self._open[key] = Mailbox(request_id, self._max_waiting_events)
        timer = asyncio.get_running_loop().call_later(
            max(0.0, (deadline_ns - time.time_ns()) / 1e9),
            mailbox.end,
            ErrorCode.DEADLINE,
            "no answer before the deadline; ask for less, or give it more time",
        )
        sequence = Sequence()
        over = False
        try:
            refusal = await self._publish(request_id, subject, encode(request), headers)
            if refusal is not None:
                over = not refusal.may_be_stored
                yield Failed(request_id=request_id, error=refusal.error)
                return
            while True:
                event = await mailbox.get()
                try:
                    passed = _pass(event, sequence)
                except TokensLost as error:
                    yield Failed(request_id=request_id, error=Error(code=ErrorCode.INTERNAL, message=str(error)))
                    return
                if isinstance(event, Finished | Failed):
                    # What this side says (deadline, too slow a reader) leaves the request running: it is cancelled.
                    over = event is not mailbox.ended
                if passed is not None:
                    yield passed
                if isinstance(event, Finished | Failed):
                    return
        finally:
            timer.cancel()
            del self._open[key]
            if not over:
                await self.cancel(request_id)

    async def _publish(
        self, request_id: RequestId, subject: str, data: bytes, headers: dict[str, str]
    ) -> "_Refusal | None":
        """Store the request. None where it is stored."""
        if not self._bus.is_connected:
            return _refusal(ErrorCode.UNAVAILABLE, "the NATS server can't be reached; try again shortly")
        try:
            await self._bus.stream_publish(
                subject, data, headers=headers, msg_id=request_id, timeout_s=_PUBLISH_TIMEOUT_S
            )
        except StreamFull:
            return _refusal(ErrorCode.OVERLOADED, "the queue of requests is full; try again later")
        except PayloadTooLarge as error:
            return _refusal(ErrorCode.INVALID_REQUEST, str(error))
        except NoStream:
            return _refusal(
                ErrorCode.UNAVAILABLE, "nobody takes requests: start a conductor, which sets up their queue"
            )
        except BusTimeout as error:
            return _refusal(ErrorCode.UNAVAILABLE, f"the request could not be queued: {error}", may_be_stored=True)
        except BusError as error:
            return _refusal(ErrorCode.UNAVAILABLE, f"the request could not be queued: {error}")
        return None

    async def _on_event(self, message: BusMessage) -> None:
        mailbox = self._open.get(message.subject.removeprefix(f"{self._inbox}."))
        if mailbox is None:
            self.num_late += 1
            return
        try:
            mailbox.put(self._decoder.decode(message.data, message.headers))
        except Undecodable as error:
            mailbox.end(ErrorCode.INTERNAL, f"an answer can't be read: {error}")

    def _on_connection(self, state: ConnectionState) -> None:
        # A lost connection comes back, and workers keep their tokens meanwhile: only its end ends the requests.
        if state is ConnectionState.CLOSED:
            for mailbox in self._open.values():
                mailbox.end(ErrorCode.UNAVAILABLE, "the connection to NATS is closed")


def _pass(event: TokenEvent, sequence: Sequence) -> TokenEvent | None:
    match event:
        case Tokens():
            return sequence.accept(event)
        case Finished():
            return sequence.finish(event)
        case Failed():
            return event


@dataclass(frozen=True, slots=True)
class _Refusal:
    error: Error
    may_be_stored: bool


def _refusal(code: ErrorCode, message: str, *, may_be_stored: bool = False) -> _Refusal:
    return _Refusal(Error(code=code, message=message), may_be_stored)
