"""Where requests come in: the work queue, and plain NATS requests, which are put into it."""

import time
from collections.abc import Callable

import structlog

from halfmoon.bus.codec import CONTENT_TYPES, detect_encoding
from halfmoon.bus.errors import BusError, StreamFull, Undecodable
from halfmoon.bus.protocol import Bus, BusMessage, Delivery, EndpointRecord, Subscription
from halfmoon.bus.streams import REQUESTS
from halfmoon.conductor.instruments import Instruments
from halfmoon.conductor.intake import Reader, Refused
from halfmoon.conductor.owner import Owner
from halfmoon.conductor.requests import OpenRequests
from halfmoon.conductor.speaker import Speaker
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import RequestId, new_request_id
from halfmoon.schemas.requests import RequestCancel
from halfmoon.schemas.wire import HEADER_CONTENT_TYPE, HEADER_REPLY, Error, ErrorCode

DURABLE = "conductors"
"""Name of the consumer, and of the queue group, that all conductors share."""
MAX_ACK_PENDING = 100_000
"""Of all conductors together: each has its own limit."""


class Front:
    def __init__(
        self,
        bus: Bus,
        reader: Reader,
        owner: Owner,
        requests: OpenRequests,
        speaker: Speaker,
        instruments: Instruments,
        log: structlog.stdlib.BoundLogger,
        is_draining: Callable[[], bool],
    ) -> None:
        self._bus = bus
        self._reader = reader
        self._owner = owner
        self._requests = requests
        self._speaker = speaker
        self._instruments = instruments
        self._log = log
        self._is_draining = is_draining
        self._record: EndpointRecord | None = None
        self._work: Subscription | None = None
        self._plain: Subscription | None = None

    async def open(self, record: EndpointRecord, *, ack_wait_s: float, max_open: int) -> None:
        """Begin to take requests. `record` counts the plain ones in the services API."""
        self._record = record
        await self._bus.ensure_stream(REQUESTS)
        self._plain = await self._bus.subscribe(subjects.GENERATE_ALL, self._on_plain, queue=DURABLE)
        self._work = await self._bus.consume(
            REQUESTS.name,
            DURABLE,
            subjects.REQUEST_ALL,
            self._on_delivery,
            ack_wait_s=ack_wait_s,
            max_ack_pending=MAX_ACK_PENDING,
            max_outstanding=max_open,
        )

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, and wait for what this conductor owns; what lasts longer is cut off."""
        if self._plain is not None:
            await self._plain.drain(timeout_s)
        if self._work is not None:
            await self._work.drain(timeout_s)

    async def close(self) -> None:
        """What is still owned stays unsettled, and goes to another conductor. Idempotent."""
        for subscription in (self._plain, self._work):
            if subscription is not None:
                await subscription.unsubscribe()
        self._plain = self._work = None

    async def _on_delivery(self, delivery: Delivery) -> None:
        if self._is_draining():
            await delivery.nak()
            return
        heard = self._reader.read(delivery.message, stream_seq=delivery.stream_seq, now_ns=time.time_ns())
        match heard:
            case RequestCancel():
                self._requests.cancel(heard.request_id, heard.reason)
                await delivery.ack()
            case Refused():
                await self._refuse(heard, delivery.subject)
                await delivery.term()
            case _:
                await self._owner.own(heard, delivery)

    async def _refuse(self, refused: Refused, subject: str) -> None:
        if refused.error.code is ErrorCode.INVALID_MESSAGE:
            self._instruments.undecodable.inc()
        if refused.reply is None:
            self._instruments.no_reply.inc()
        self._log.warning(
            "request refused unread",
            subject=subject,
            code=refused.error.code.value,
            error=refused.error.message,
            has_reply=refused.reply is not None,
        )
        if refused.reply is not None:
            await self._speaker.fail(refused.reply, refused.encoding, refused.request_id, refused.error)

    async def _on_plain(self, message: BusMessage) -> None:
        """Put a plain request into the work queue, with its caller's reply subject in a header."""
        started_ns = time.perf_counter_ns()
        error = await self._enqueue(message)
        if self._record is not None:
            self._record.count(time.perf_counter_ns() - started_ns, error)

    async def _enqueue(self, message: BusMessage) -> str | None:
        """What went wrong, in one word."""
        headers = {name.lower(): value for name, value in message.headers.items()}
        encoding = detect_encoding(message.data, headers)
        reply = headers.get(HEADER_REPLY) or message.reply
        request_id = RequestId("")
        try:
            body = self._reader.decode(message.data, headers)
            if isinstance(body, RequestCancel):
                self._requests.cancel(body.request_id, body.reason)
                await self._bus.publish(subjects.CANCEL, message.data, headers=headers)
                return None
            request_id = body.request_id or new_request_id()
            if reply is not None:
                headers[HEADER_REPLY] = reply
            headers[HEADER_CONTENT_TYPE] = CONTENT_TYPES[encoding]
            model = message.subject.rsplit(".", 1)[-1]
            subject = f"{subjects.PREFIX}.request.{model}"
            if subject == subjects.CANCEL:
                raise Undecodable("no model can be called 'cancel'")
            await self._bus.stream_publish(subject, message.data, headers=headers, msg_id=request_id)
        except Undecodable as problem:
            self._instruments.undecodable.inc()
            error = Error(code=ErrorCode.INVALID_MESSAGE, message=str(problem))
        except StreamFull as problem:
            error = Error(code=ErrorCode.OVERLOADED, message=str(problem), retry_after_s=1.0)
        except BusError as problem:
            error = Error(code=ErrorCode.UNAVAILABLE, message=str(problem), retry_after_s=1.0)
        else:
            return None
        if reply is None:
            self._instruments.no_reply.inc()
        else:
            await self._speaker.fail(reply, encoding, request_id, error)
        return error.code.value
