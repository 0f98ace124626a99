"""Reading streams: consumers that ask for what they have room for, so nothing is lost to a slow reader.

A pull asks for a number of messages and stays open until they came or it expires. Its inbox also gets status messages
(404, 408, 409: over; 100: alive), told from data by the header `Status`.
"""

import abc
import asyncio
import secrets
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec
import structlog

from halfmoon.bus.dispatch import Dispatcher
from halfmoon.bus.errors import BusClosed, BusError, StreamGap
from halfmoon.bus.jetstream import API, NS_PER_S, JetStream
from halfmoon.bus.protocol import (
    DRAIN_TIMEOUT_S,
    BusMessage,
    ConnectionState,
    DeliveryHandler,
    FollowHandler,
    GapHandler,
    Settlement,
    Subscription,
)
from halfmoon.bus.work import WorkSet

_log = structlog.stdlib.get_logger(__name__)

_PULL_EXPIRES_S: Final = 20.0
_HEARTBEAT_S: Final = 2.0
_SILENCE_S: Final = 3 * _HEARTBEAT_S
"""Without even a heartbeat for so long, the pull is lost, and perhaps its consumer."""
_TICK_S: Final = 0.5
_RETRY_S: Final = 0.25
_EPHEMERAL_LIFE_S: Final = 60.0
_MAX_BUFFERED: Final = 256


class AckSubject(NamedTuple):
    """What the reply subject of a stream message tells: `$JS.ACK.[<domain>.<account>.]<stream>.<consumer>.…`."""

    consumer: str
    num_delivered: int
    stream_seq: int
    consumer_seq: int

    @classmethod
    def parse(cls, subject: str) -> "AckSubject":
        """Raises ValueError where it is none."""
        tokens = subject.split(".")
        if tokens[:2] != ["$JS", "ACK"] or len(tokens) < 9:
            raise ValueError(f"{subject!r} is no ack subject")
        start = 2 if len(tokens) == 9 else 4
        consumer, num_delivered, stream_seq, consumer_seq = tokens[start + 1 : start + 5]
        return cls(consumer, int(num_delivered), int(stream_seq), int(consumer_seq))


class Puller(abc.ABC):
    """Keeps one pull open on a consumer as long as there is room; makes the consumer again when it is lost."""

    def __init__(self, jetstream: JetStream, stream: str) -> None:
        self._jetstream = jetstream
        self._bus = jetstream.bus
        self._stream = stream
        self._inbox = self._bus.new_inbox()
        self._inbox_subscription: Subscription | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._num_asked = 0
        self._heard_at = 0.0
        self._consumer = ""
        self._broken = False
        self._gap: StreamGap | None = None
        self._ended = False
        self._unwatch: Callable[[], None] | None = None

    @abc.abstractmethod
    async def _make_consumer(self) -> str:
        """Create the consumer at the broker (again), and return its name."""

    @abc.abstractmethod
    def _room(self) -> int:
        """How many messages could be taken now, those asked for included."""

    @abc.abstractmethod
    async def _take(self, message: BusMessage, source: AckSubject) -> None: ...

    async def start(self) -> None:
        """Raises what making the consumer raises."""
        self._consumer = await self._make_consumer()
        # Statuses and data are handled in order, and taking a message never waits, so this inbox can't overflow:
        # no more is asked for than there is room for.
        self._inbox_subscription = await self._bus.subscribe(self._inbox, self._receive)
        self._unwatch = self._bus.watch_connection(self._connection_changed)
        # The watch begins with the present state, which is no news; a connection lost meanwhile is.
        self._broken = not self._bus.is_connected
        self._keeper = asyncio.create_task(self._keep_pulling(), name=f"pull {self._stream}")

    @property
    def active(self) -> bool:
        return not self._ended

    @property
    def dropped(self) -> int:
        return 0

    def _connection_changed(self, state: ConnectionState) -> None:
        if state is ConnectionState.CONNECTED and not self._ended:
            self._num_asked = 0
            self._broken = True
            self._wake.set()

    async def _keep_pulling(self) -> None:
        now = asyncio.get_running_loop().time
        self._heard_at = now()
        self._wake.set()
        while True:
            try:
                async with asyncio.timeout(_TICK_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            if not self._bus.is_connected:
                self._heard_at = now()
                continue
            if self._num_asked and now() - self._heard_at > _SILENCE_S:
                self._broken = True
            try:
                if self._gap is not None:
                    raise self._gap
                if self._broken:
                    self._consumer = await self._make_consumer()
                    self._broken = False
                    self._num_asked = 0
                await self._top_up()
            except StreamGap as gap:
                await self._on_gap(gap)
                return
            except BusClosed:
                return
            except BusError as error:
                _log.warning("a stream can't be read; trying again", stream=self._stream, error=str(error))
                self._broken = True
                await asyncio.sleep(_RETRY_S)
                self._wake.set()

    async def _top_up(self) -> None:
        room = self._room()
        missing = room - self._num_asked
        # Asking again only once half is used up keeps requests few.
        if missing <= 0 or (self._num_asked and missing * 2 < room):
            return
        ask = {
            "batch": missing,
            "expires": int(_PULL_EXPIRES_S * NS_PER_S),
            "idle_heartbeat": int(_HEARTBEAT_S * NS_PER_S),
        }
        if not self._num_asked:
            self._heard_at = asyncio.get_running_loop().time()
        self._num_asked += missing
        subject = f"{API}.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
        await self._bus.publish(subject, msgspec.json.encode(ask), reply=self._inbox)

    async def _receive(self, message: BusMessage) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        status = message.headers.get("Status")
        if status is None and message.reply is not None:
            source = AckSubject.parse(message.reply)
            self._num_asked = max(0, self._num_asked - 1)
            await self._take(message, source)
        elif status != "100":
            unserved = message.headers.get("Nats-Pending-Messages")
            self._num_asked = max(0, self._num_asked - int(unserved)) if unserved is not None else 0
            # 404 and 408 are the ordinary ends of a pull; 409 and 503 say that something happened to the consumer.
            self._broken = self._broken or status not in ("404", "408")
        self._wake.set()

    async def _on_gap(self, gap: StreamGap) -> None:
        raise gap

    async def _stop_pulling(self) -> None:
        self._ended = True
        if self._unwatch is not None:
            self._unwatch()
        if self._keeper is not None and self._keeper is not asyncio.current_task():
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._inbox_subscription is not None:
            await self._inbox_subscription.unsubscribe()


class Consumption(Puller):
    """A durable consumer's share of the work, in this process."""

    def __init__(
        self,
        jetstream: JetStream,
        stream: str,
        durable: str,
        filter_subject: str,
        handler: DeliveryHandler,
        *,
        ack_wait_s: float,
        max_ack_pending: int,
        max_deliver: int,
        max_outstanding: int,
    ) -> None:
        super().__init__(jetstream, stream)
        self._durable = durable
        self._config: dict[str, object] = {
            "durable_name": durable,
            "name": durable,
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "ack_wait": int(ack_wait_s * NS_PER_S),
            "max_ack_pending": max_ack_pending,
            "max_deliver": max_deliver,
            "filter_subject": filter_subject,
        }
        self._work = WorkSet(
            stream, handler, ack_wait_s=ack_wait_s, max_outstanding=max_outstanding, on_room=self._wake.set
        )

    @property
    def pending(self) -> int:
        return self._work.num_held

    @property
    def failed(self) -> int:
        return self._work.failed

    async def _make_consumer(self) -> str:
        await self._jetstream.create_consumer(self._stream, self._config)
        return self._durable

    def _room(self) -> int:
        return self._work.room()

    async def _take(self, message: BusMessage, source: AckSubject) -> None:
        ack_subject = message.reply or ""

        async def settle(settlement: Settlement, delay_s: float) -> None:
            await self._bus.publish(ack_subject, _settlement_bytes(settlement, delay_s))

        bare = BusMessage(message.subject, message.data, message.headers)
        self._work.accept(
            bare,
            receipt=ack_subject,
            stream_seq=source.stream_seq,
            num_delivered=source.num_delivered,
            settle=settle,
        )

    async def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        await self._stop_pulling()
        await self._work.join(timeout_s)
        await self._work.stop()

    async def unsubscribe(self) -> None:
        await self._stop_pulling()
        await self._work.stop()


class Following(Puller):
    """An ordered reader: an ephemeral consumer, made anew from the next sequence whenever its order breaks."""

    def __init__(
        self,
        jetstream: JetStream,
        stream: str,
        handler: FollowHandler,
        *,
        start_seq: int,
        on_gap: GapHandler,
        filter_subject: str | None,
    ) -> None:
        super().__init__(jetstream, stream)
        if start_seq < 1:
            raise ValueError(f"the first sequence of a stream is 1, got start_seq={start_seq}")
        self._next_seq = start_seq
        self._next_consumer_seq = 1
        self._skipped_at: int | None = None
        self._gap_handler = on_gap
        self._filter_subject = filter_subject

        async def handle(item: tuple[int, BusMessage]) -> None:
            try:
                await handler(*item)
            finally:
                self._wake.set()

        self._dispatcher: Dispatcher[tuple[int, BusMessage]] = Dispatcher(
            f"stream {stream}", handle, max_pending=2 * _MAX_BUFFERED
        )

    @property
    def pending(self) -> int:
        return self._dispatcher.pending

    @property
    def failed(self) -> int:
        return self._dispatcher.failed

    async def start(self) -> None:
        try:
            await super().start()
        except BaseException:
            await self._dispatcher.stop()
            raise

    async def _make_consumer(self) -> str:
        if self._consumer:
            await self._jetstream.delete_consumer(self._stream, self._consumer)
        await self._jetstream.check_reach(self._stream, self._next_seq)
        name = f"follow-{secrets.token_hex(8)}"
        config: dict[str, object] = {
            "name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._next_seq,
            "ack_policy": "none",
            "max_deliver": 1,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": int(_EPHEMERAL_LIFE_S * NS_PER_S),
        }
        if self._filter_subject is not None:
            config["filter_subject"] = self._filter_subject
        self._consumer = name
        self._next_consumer_seq = 1
        await self._jetstream.create_consumer(self._stream, config)
        return name

    def _room(self) -> int:
        return _MAX_BUFFERED - self._dispatcher.pending

    async def _take(self, message: BusMessage, source: AckSubject) -> None:
        if source.consumer != self._consumer or source.stream_seq < self._next_seq:
            return
        skipped = self._filter_subject is None and source.stream_seq != self._next_seq
        if skipped and self._skipped_at == self._next_seq:
            self._gap = StreamGap(self._stream, self._next_seq, source.stream_seq, source.stream_seq)
            return
        if source.consumer_seq != self._next_consumer_seq or skipped:
            # Made again, the consumer delivers what got lost on the way; what it skips twice is gone from the stream.
            self._skipped_at = self._next_seq
            self._broken = True
            return
        item = (source.stream_seq, BusMessage(message.subject, message.data, message.headers))
        if not self._dispatcher.offer(item, len(message.data)):
            self._broken = True
            return
        self._next_seq = source.stream_seq + 1
        self._next_consumer_seq += 1

    async def _on_gap(self, gap: StreamGap) -> None:
        self._ended = True
        if self._inbox_subscription is not None:
            await self._inbox_subscription.unsubscribe()
        await self._dispatcher.join(DRAIN_TIMEOUT_S)
        await self._dispatcher.stop()
        try:
            await self._gap_handler(gap)
        except Exception:
            _log.exception("a stream gap could not be handled", stream=self._stream)

    async def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        await self._stop_pulling()
        await self._dispatcher.join(timeout_s)
        await self._end()

    async def unsubscribe(self) -> None:
        await self._stop_pulling()
        await self._end()

    async def _end(self) -> None:
        await self._dispatcher.stop()
        if self._consumer and self._bus.is_connected:
            consumer, self._consumer = self._consumer, ""
            await self._jetstream.delete_consumer(self._stream, consumer)


def _settlement_bytes(settlement: Settlement, delay_s: float) -> bytes:
    if settlement is Settlement.NAK and delay_s > 0:
        return b"-NAK " + msgspec.json.encode({"delay": int(delay_s * NS_PER_S)})
    return settlement.value.encode()
