"""Who reads a stream in memory: members of a durable consumer, and followers."""

import asyncio

import structlog

from halfmoon.bus import matching
from halfmoon.bus.dispatch import Dispatcher
from halfmoon.bus.errors import StreamGap
from halfmoon.bus.memory_broker import MemoryBroker
from halfmoon.bus.memory_stream import Consumer, Member, MemoryStream
from halfmoon.bus.protocol import (
    DRAIN_TIMEOUT_S,
    BusMessage,
    DeliveryHandler,
    FollowHandler,
    GapHandler,
    Settlement,
)
from halfmoon.bus.work import WorkSet

_log = structlog.stdlib.get_logger(__name__)

_MAX_BUFFERED = 256


class WorkMember:
    """A member of a durable consumer."""

    def __init__(
        self,
        broker: MemoryBroker,
        stream: MemoryStream,
        consumer: Consumer,
        handler: DeliveryHandler,
        *,
        max_outstanding: int,
    ) -> None:
        self._broker = broker
        self._stream = stream
        self._consumer = consumer
        self._work = WorkSet(
            stream.spec.name,
            handler,
            ack_wait_s=consumer.ack_wait_s,
            max_outstanding=max_outstanding,
            on_room=self._on_room,
            now=broker.now,
        )
        self._member = Member(self._work.room, self._accept)
        consumer.members.append(self._member)
        self._on_room()

    @property
    def pending(self) -> int:
        return self._work.num_held

    @property
    def dropped(self) -> int:
        return 0

    @property
    def failed(self) -> int:
        return self._work.failed

    @property
    def active(self) -> bool:
        return self._member in self._consumer.members

    def _on_room(self) -> None:
        self._stream.pump()
        self._broker.arm()

    def _accept(self, seq: int, num_delivered: int, message: BusMessage) -> None:
        async def settle(settlement: Settlement, delay_s: float) -> None:
            self._stream.settle(self._consumer, seq, settlement, delay_s)
            self._broker.arm()

        receipt = self._broker.receipt(self._stream, self._consumer, seq)
        self._work.accept(message, receipt=receipt, stream_seq=seq, num_delivered=num_delivered, settle=settle)

    async def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        self._leave()
        await self._work.join(timeout_s)
        await self._work.stop()

    async def unsubscribe(self) -> None:
        self._leave()
        await self._work.stop()

    def _leave(self) -> None:
        if self._member in self._consumer.members:
            self._consumer.members.remove(self._member)


class MemoryFollower:
    """An ordered reader of a stream."""

    def __init__(
        self,
        stream: MemoryStream,
        handler: FollowHandler,
        *,
        start_seq: int,
        on_gap: GapHandler,
        filter_subject: str | None,
    ) -> None:
        self._stream = stream
        self._next_seq = start_seq
        self._gap_handler = on_gap
        self._filter_subject = filter_subject
        self._gap_task: asyncio.Task[None] | None = None

        async def handle(item: tuple[int, BusMessage]) -> None:
            try:
                await handler(*item)
            finally:
                self._pump()

        self._dispatcher: Dispatcher[tuple[int, BusMessage]] = Dispatcher(
            f"stream {stream.spec.name}", handle, max_pending=2 * _MAX_BUFFERED
        )
        stream.listeners.add(self._pump)
        self._pump()

    @property
    def pending(self) -> int:
        return self._dispatcher.pending

    @property
    def dropped(self) -> int:
        return 0

    @property
    def failed(self) -> int:
        return self._dispatcher.failed

    @property
    def active(self) -> bool:
        return self._pump in self._stream.listeners

    def _pump(self) -> None:
        if not self.active:
            return
        while self._next_seq <= self._stream.last_seq and self._dispatcher.pending < _MAX_BUFFERED:
            message = self._stream.get(self._next_seq)
            if message is None:
                gap = StreamGap(self._stream.spec.name, self._next_seq, self._stream.first_seq, self._stream.last_seq)
                self._stream.listeners.discard(self._pump)
                self._gap_task = asyncio.create_task(self._report(gap))
                return
            if self._filter_subject is None or matching.matches(self._filter_subject, message.subject):
                self._dispatcher.offer((self._next_seq, message), len(message.data))
            self._next_seq += 1

    async def _report(self, gap: StreamGap) -> None:
        await self._dispatcher.join(DRAIN_TIMEOUT_S)
        await self._dispatcher.stop()
        try:
            await self._gap_handler(gap)
        except Exception:
            _log.exception("a stream gap could not be handled", stream=self._stream.spec.name)

    async def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        self._stream.listeners.discard(self._pump)
        await self._dispatcher.join(timeout_s)
        await self.unsubscribe()

    async def unsubscribe(self) -> None:
        self._stream.listeners.discard(self._pump)
        if self._gap_task is not None and self._gap_task is not asyncio.current_task():
            self._gap_task.cancel()
            await asyncio.gather(self._gap_task, return_exceptions=True)
        await self._dispatcher.stop()
