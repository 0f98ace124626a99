"""`Bus` in one process, for tests, simulations and everything on one event loop. Same semantics as over NATS."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from halfmoon.bus import matching
from halfmoon.bus.dispatch import DispatchedSubscription, Dispatcher
from halfmoon.bus.errors import BusClosed, BusTimeout, NoResponders, NoStream, StreamFull
from halfmoon.bus.memory_broker import Interest, MemoryBroker, Receipt
from halfmoon.bus.memory_readers import MemoryFollower, WorkMember
from halfmoon.bus.micro import MicroService
from halfmoon.bus.protocol import (
    DEFAULT_MAX_PENDING,
    DEFAULT_MAX_PENDING_BYTES,
    DRAIN_TIMEOUT_S,
    BusMessage,
    ConnectionState,
    DeliveryHandler,
    FollowHandler,
    GapHandler,
    MessageHandler,
    StreamSpec,
    Subscription,
)

__all__ = ["MemoryBroker", "MemoryBus"]


class MemoryBus:
    """One client of a broker; of its own, where none is given."""

    def __init__(self, broker: MemoryBroker | None = None) -> None:
        self.broker = broker if broker is not None else MemoryBroker()
        self._subscriptions: set[Subscription] = set()
        self._services: list[MicroService] = []
        self._watchers: dict[object, Callable[[ConnectionState], None]] = {}
        self._requests: set[asyncio.Future[BusMessage]] = set()
        self._closed = False

    @property
    def is_connected(self) -> bool:
        return not self._closed

    @property
    def max_payload_bytes(self) -> int:
        return self.broker.max_payload_bytes

    def watch_connection(self, callback: Callable[[ConnectionState], None]) -> Callable[[], None]:
        key = object()
        self._watchers[key] = callback
        callback(ConnectionState.CLOSED if self._closed else ConnectionState.CONNECTED)
        return partial(self._forget_watcher, key)

    def _forget_watcher(self, key: object) -> None:
        self._watchers.pop(key, None)

    def new_inbox(self) -> str:
        return matching.new_inbox()

    async def publish(
        self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None, reply: str | None = None
    ) -> None:
        self.broker.send(self._checked(subject, data, headers, reply))

    async def request(
        self, subject: str, data: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> BusMessage:
        inbox = self.new_inbox()
        message = self._checked(subject, data, headers, inbox)
        answer = self.broker.expect(inbox)
        self._requests.add(answer)
        try:
            if not self.broker.send(message):
                raise NoResponders(subject)
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise BusTimeout(subject, timeout_s) from error
        finally:
            self._requests.discard(answer)
            self.broker.give_up(inbox)

    async def respond(self, message: BusMessage, data: bytes, *, headers: Mapping[str, str] | None = None) -> None:
        if message.reply is not None:
            await self.publish(message.reply, data, headers=headers)

    async def subscribe(
        self,
        subject: str,
        handler: MessageHandler,
        *,
        queue: str | None = None,
        concurrency: int = 1,
        max_pending: int = DEFAULT_MAX_PENDING,
        max_pending_bytes: int = DEFAULT_MAX_PENDING_BYTES,
    ) -> Subscription:
        self._check_open()
        matching.check_pattern(subject)
        matching.check_queue(queue)
        dispatcher = Dispatcher(
            subject, handler, concurrency=concurrency, max_pending=max_pending, max_pending_bytes=max_pending_bytes
        )

        def deliver(message: BusMessage) -> None:
            dispatcher.offer(message, len(message.data))

        interest = Interest(subject, queue, deliver)
        self.broker.attach(interest)

        async def end_interest(gently: bool) -> None:
            self.broker.detach(interest)
            self._subscriptions.discard(subscription)

        subscription = DispatchedSubscription(dispatcher, end_interest)
        self._subscriptions.add(subscription)
        return subscription

    async def ensure_stream(self, spec: StreamSpec) -> None:
        self._check_open()
        self.broker.ensure_stream(spec)

    async def stream_publish(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        msg_id: str | None = None,
        timeout_s: float = 5.0,
    ) -> int:
        inbox = self.new_inbox()
        message = self._checked(subject, data, headers, inbox)
        if self.broker.stream_for(subject) is None:
            raise NoStream(subject)
        answer = self.broker.expect(inbox)
        try:
            self.broker.send(message, msg_id=msg_id)
            receipt = msgspec.json.decode(answer.result().data, type=Receipt)
        finally:
            self.broker.give_up(inbox)
        if receipt.error is not None:
            raise StreamFull(receipt.error)
        return receipt.seq

    async def consume(
        self,
        stream: str,
        durable: str,
        filter_subject: str,
        handler: DeliveryHandler,
        *,
        ack_wait_s: float = 30.0,
        max_ack_pending: int = 1000,
        max_deliver: int = -1,
        max_outstanding: int = 64,
    ) -> Subscription:
        self._check_open()
        source = self.broker.stream(stream)
        consumer = source.consumer(
            durable, filter_subject, ack_wait_s=ack_wait_s, max_ack_pending=max_ack_pending, max_deliver=max_deliver
        )
        work = WorkMember(self.broker, source, consumer, handler, max_outstanding=max_outstanding)
        self._keep(work)
        return work

    async def follow(
        self,
        stream: str,
        handler: FollowHandler,
        *,
        start_seq: int,
        on_gap: GapHandler,
        filter_subject: str | None = None,
    ) -> Subscription:
        self._check_open()
        if start_seq < 1:
            raise ValueError(f"the first sequence of a stream is 1, got start_seq={start_seq}")
        source = self.broker.stream(stream)
        source.check_reach(start_seq)
        following = MemoryFollower(source, handler, start_seq=start_seq, on_gap=on_gap, filter_subject=filter_subject)
        self._keep(following)
        return following

    async def stream_last_seq(self, stream: str) -> int:
        self._check_open()
        return self.broker.stream(stream).last_seq

    async def stream_has(self, stream: str, seq: int) -> bool:
        self._check_open()
        return self.broker.stream(stream).get(seq) is not None

    async def add_service(
        self, name: str, version: str, description: str = "", *, metadata: Mapping[str, str] | None = None
    ) -> MicroService:
        service = MicroService(name, version, description, metadata or {})
        await service.start(self)
        self.broker.services.append(service)
        return service

    async def flush(self, timeout_s: float = 5.0) -> None:
        self._check_open()

    async def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        await asyncio.gather(*(subscription.drain(timeout_s) for subscription in list(self._subscriptions)))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for subscription in list(self._subscriptions):
            await subscription.unsubscribe()
        for answer in list(self._requests):
            if not answer.done():
                answer.set_exception(BusClosed("the bus was closed while a request waited"))
        for callback in list(self._watchers.values()):
            callback(ConnectionState.CLOSED)

    def _keep(self, subscription: Subscription) -> None:
        self._subscriptions = {kept for kept in self._subscriptions if kept.active}
        self._subscriptions.add(subscription)

    def _check_open(self) -> None:
        if self._closed:
            raise BusClosed("the bus is closed")

    def _checked(self, subject: str, data: bytes, headers: Mapping[str, str] | None, reply: str | None) -> BusMessage:
        self._check_open()
        matching.check_subject(subject)
        if reply is not None:
            matching.check_subject(reply)
        cleaned = matching.clean_headers(headers)
        matching.check_size(data, cleaned, self.broker.max_payload_bytes)
        return BusMessage(subject, bytes(data), cleaned, reply)
