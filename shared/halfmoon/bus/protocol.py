"""What a bus does. Bytes in, bytes out: typed messages are the layer above (`codec`, `endpoint`).

Core messages (`publish`, `subscribe`, `request`) reach who listens now, at most once. Stream messages are stored first,
and reach each durable consumer at least once, and each follower in order without gaps.
"""

import enum
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from halfmoon.bus.errors import StreamGap

DEFAULT_MAX_PENDING = 8192
DEFAULT_MAX_PENDING_BYTES = 64 * 1024 * 1024
DRAIN_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class BusMessage:
    subject: str
    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    reply: str | None = None
    """Where the sender waits for an answer. Always None for stream messages: the broker uses it for itself."""


class Settlement(enum.Enum):
    """What a consumer tells the broker about a delivery."""

    ACK = "+ACK"
    NAK = "-NAK"
    IN_PROGRESS = "+WPI"
    TERM = "+TERM"


Settle = Callable[[Settlement, float], Awaitable[None]]
"""Sends one settlement; the number is the delay in seconds that goes with a NAK."""


class Delivery:
    """A message from a work queue. It comes again, perhaps elsewhere, unless it is settled within `ack_wait_s`.

    Settling a delivery again does nothing.
    """

    __slots__ = ("_settle", "message", "num_delivered", "receipt", "settled", "stream_seq")

    def __init__(
        self, message: BusMessage, *, receipt: str, stream_seq: int, num_delivered: int, settle: Settle
    ) -> None:
        self.message = message
        self.receipt = receipt
        """Subject at which anybody may acknowledge the message (`endpoint.acknowledge`), whoever has it by then."""
        self.stream_seq = stream_seq
        self.num_delivered = num_delivered
        """1 the first time."""
        self.settled = False
        self._settle = settle

    @property
    def subject(self) -> str:
        return self.message.subject

    @property
    def data(self) -> bytes:
        return self.message.data

    @property
    def headers(self) -> Mapping[str, str]:
        return self.message.headers

    async def ack(self) -> None:
        """Done: a work queue forgets the message."""
        await self._end(Settlement.ACK)

    async def nak(self, delay_s: float = 0.0) -> None:
        """Not done: deliver it again, after `delay_s`."""
        await self._end(Settlement.NAK, delay_s)

    async def term(self) -> None:
        """Never to be done: don't deliver it again."""
        await self._end(Settlement.TERM)

    async def in_progress(self) -> None:
        """Still at it: `ack_wait_s` begins anew. Any number of times."""
        if not self.settled:
            await self._settle(Settlement.IN_PROGRESS, 0.0)

    async def _end(self, settlement: Settlement, delay_s: float = 0.0) -> None:
        if not self.settled:
            self.settled = True
            await self._settle(settlement, delay_s)


class Retention(enum.Enum):
    WORK_QUEUE = "workqueue"
    """A message goes once it is acked. At the limit, new ones are refused with `StreamFull`."""
    LIMITS = "limits"
    """Messages stay until they are too old or too many; at the limit, the oldest go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    name: str
    subjects: tuple[str, ...]
    retention: Retention
    max_age_s: float = 0.0
    """0: any age."""
    max_bytes: int = -1
    """-1: without a limit."""
    duplicate_window_s: float = 120.0
    """A message id seen within this time is not stored again."""
    num_replicas: int = 1


class ConnectionState(enum.Enum):
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    """Lost; it is being sought again, for as long as it takes."""
    CLOSED = "closed"
    """For good: closed by us, or the broker refuses us (credentials withdrawn, protocol error)."""


MessageHandler = Callable[[BusMessage], Awaitable[None]]
DeliveryHandler = Callable[[Delivery], Awaitable[None]]
FollowHandler = Callable[[int, BusMessage], Awaitable[None]]
"""Gets the stream sequence and the message."""
GapHandler = Callable[[StreamGap], Awaitable[None]]


class Subscription(Protocol):
    """Messages on their way to one handler.

    An exception in the handler is logged and counted in `failed`; the subscription goes on.
    """

    @property
    def pending(self) -> int:
        """Messages that wait, and that are being handled."""

    @property
    def dropped(self) -> int:
        """Messages lost because `max_pending` were waiting already."""

    @property
    def failed(self) -> int:
        """Handler calls that raised."""

    @property
    def active(self) -> bool:
        """False once it has ended, by `unsubscribe`, `drain` or the end of the bus."""

    async def unsubscribe(self) -> None:
        """Stop at once: what waits is discarded, running handlers are cancelled. Idempotent."""

    async def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Take nothing new, handle what waits, then stop; what isn't done after `timeout_s` is cut off. Idempotent.

        Not from within the subscription's own handler, which would wait for itself.
        """


class EndpointRecord(Protocol):
    """One endpoint's figures in the services API."""

    def count(self, duration_ns: int, error: str | None = None) -> None: ...


class ServiceRecord(Protocol):
    """This process's entry in the NATS services API."""

    @property
    def id(self) -> str: ...

    def add_endpoint(self, name: str, subject: str, queue: str | None = None) -> EndpointRecord:
        """Make an endpoint show in `nats micro info` and `stats`. Its messages are subscribed to elsewhere."""

    async def stop(self) -> None:
        """Leave the services API. Idempotent."""


class Bus(Protocol):
    """One process's connection to the broker.

    Its life: 1. it is handed out connected; 2. it is used; 3. `drain`, which may be left out; 4. `close`.

    Every method may raise `BusClosed` after `close`, and `BadSubject` for names that the protocol doesn't allow.
    """

    @property
    def is_connected(self) -> bool: ...

    @property
    def max_payload_bytes(self) -> int:
        """The largest message, headers included."""

    def watch_connection(self, callback: Callable[[ConnectionState], None]) -> Callable[[], None]:
        """Call `callback` with the state, now and at each change, until the function that this returns is called."""

    def new_inbox(self) -> str:
        """A fresh subject that nobody else uses, for replies."""

    async def publish(
        self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None, reply: str | None = None
    ) -> None:
        """Send, without waiting for anybody. Raises `PayloadTooLarge`, `BusDisconnected`."""

    async def request(
        self, subject: str, data: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> BusMessage:
        """Send, and return the first answer. Raises `NoResponders`, `BusTimeout`, and what `publish` raises."""

    async def respond(self, message: BusMessage, data: bytes, *, headers: Mapping[str, str] | None = None) -> None:
        """Answer a request; nothing happens where its sender waits for no answer."""

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
        """Hand each message on `subject` (wildcards `*`, `>`) to `handler`, in order, `concurrency` at a time.

        Of the subscriptions with the same `queue`, wherever they are, one gets each message. The subscription is in
        place at the broker when this returns.
        """

    async def ensure_stream(self, spec: StreamSpec) -> None:
        """Create the stream, or bring an existing one to this spec. Its retention can't be changed: `BusError`."""

    async def stream_publish(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        msg_id: str | None = None,
        timeout_s: float = 5.0,
    ) -> int:
        """Store a message in the stream that captures `subject`, and return its sequence.

        With a `msg_id`, a lost answer is asked for again until `timeout_s`, and a repeat returns the sequence of the
        first. Raises `NoStream`, `StreamFull`, `BusTimeout`, `PayloadTooLarge`.
        """

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
        """Take work from a stream. All processes that consume under one `durable` name share it.

        At most `max_outstanding` unsettled deliveries are held here, and `max_ack_pending` by all together. Handlers
        start in order and run side by side. One that returns without settling keeps its delivery; one that raises
        gives it back, to be delivered again a second later.
        """

    async def follow(
        self,
        stream: str,
        handler: FollowHandler,
        *,
        start_seq: int,
        on_gap: GapHandler,
        filter_subject: str | None = None,
    ) -> Subscription:
        """Read a stream from `start_seq` on, and what comes after it, in order, each message once.

        Goes on by itself after lost connections and broker restarts. Raises `StreamGap` where the stream no longer
        reaches back to `start_seq`, or ends before it; later on, such a gap goes to `on_gap`, and the subscription
        ends. A failing handler is logged, and its message is not repeated.
        With a filter, messages that are dropped while it is connected but more than the stream's limits behind go
        unnoticed; without one they show as a gap.
        """

    async def stream_last_seq(self, stream: str) -> int:
        """Sequence of the newest message ever stored; 0 where there was none. Raises `NoStream`."""

    async def stream_has(self, stream: str, seq: int) -> bool:
        """Whether a stream still has the message with this sequence: of a work queue, until somebody has settled it.
        Raises `NoStream`, `BusTimeout`."""

    async def add_service(
        self, name: str, version: str, description: str = "", *, metadata: Mapping[str, str] | None = None
    ) -> ServiceRecord:
        """Show this process in the NATS services API (`nats micro ls`).

        The name is letters, digits, `-` and `_`; the version is semantic (`1.2.3`). Raises `ValueError` otherwise.
        """

    async def flush(self, timeout_s: float = 5.0) -> None:
        """Return once the broker has got all that was sent so far. Raises `BusTimeout`."""

    async def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Stop hearing, not speaking. Bounded by about `timeout_s`, idempotent.

        1. All subscriptions, consumers and followers take nothing new.
        2. What they have is handled. What isn't done in time is cut off, to be redelivered where it is work.
        3. What was sent has reached the broker.

        Publishing and requesting still work afterwards, until `close`.
        """

    async def close(self) -> None:
        """Cancel what still runs, and disconnect. Idempotent."""
