"""`Bus` over a NATS server. The only file that imports nats-py, whose exceptions end here."""

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Self

import structlog
from nats import errors as nats_errors
from nats.aio.client import Client, Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from halfmoon.bus import matching
from halfmoon.bus.dispatch import DispatchedSubscription, Dispatcher
from halfmoon.bus.errors import (
    BadSubject,
    BusClosed,
    BusDisconnected,
    BusError,
    BusTimeout,
    BusUnavailable,
    NoResponders,
)
from halfmoon.bus.jetstream import JetStream
from halfmoon.bus.micro import MicroService
from halfmoon.bus.nats_settings import NatsSettings
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
from halfmoon.bus.pull import Consumption, Following

__all__ = ["NatsBus", "NatsSettings"]

_log = structlog.stdlib.get_logger(__name__)

_CONNECT_ATTEMPT_S = 2
_PING_INTERVAL_S = 5
_MAX_UNANSWERED_PINGS = 3
_FLUSH_TIMEOUT_S = 5.0
_BUFFER_BYTES = 16 * 1024 * 1024
"""What may wait to be sent while the connection is down: two messages of the largest size."""
_CLOSE_TIMEOUT_S = 5.0
_CLOSE_FLUSH_S = 1


class NatsBus:
    """A connection that comes back by itself. Made by `NatsBus.connect`."""

    def __init__(self, settings: NatsSettings) -> None:
        self._settings = settings
        self._client = Client()
        self._subscriptions: set[Subscription] = set()
        self._services: list[MicroService] = []
        self._watchers: dict[object, Callable[[ConnectionState], None]] = {}
        self._state = ConnectionState.DISCONNECTED
        self._num_attempts = 0
        self._last_error: Exception | None = None
        self._refused = asyncio.Event()
        self._draining = False
        self._closing = False
        self._echo_prefix = self.new_inbox()
        self._echoes: dict[str, asyncio.Future[None]] = {}
        self._jetstream = JetStream(self)

    @classmethod
    async def connect(cls, settings: NatsSettings) -> Self:
        """A connected bus, or `BusUnavailable` within about `connect_timeout_s`, at once where we are refused."""
        if settings.credentials is not None and not settings.credentials.is_file():
            raise BusUnavailable(f"the NATS credentials file {settings.credentials} does not exist")
        bus = cls(settings)
        try:
            await bus._open()
        except BaseException:
            await bus.close()
            raise
        return bus

    async def _open(self) -> None:
        settings = self._settings
        credentials = settings.credentials
        attempt = asyncio.create_task(
            self._client.connect(
                servers=settings.urls,
                name=settings.name,
                user=settings.user,
                password=settings.password,
                token=settings.token,
                user_credentials=str(credentials) if credentials is not None else None,
                tls=settings.tls,
                connect_timeout=_CONNECT_ATTEMPT_S,
                reconnect_time_wait=0.1,
                max_reconnect_attempts=-1,
                reconnect_to_server_handler=self._choose_server,
                ping_interval=_PING_INTERVAL_S,
                max_outstanding_pings=_MAX_UNANSWERED_PINGS,
                pending_size=_BUFFER_BYTES,
                flush_timeout=_FLUSH_TIMEOUT_S,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_connected,
                closed_cb=self._on_closed,
            )
        )
        refused = asyncio.create_task(self._refused.wait())
        try:
            await asyncio.wait(
                {attempt, refused}, timeout=settings.connect_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if attempt.done():
                attempt.result()
            else:
                raise BusUnavailable(self._why_unavailable())
        except ImportError as error:
            raise BusUnavailable("NATS credentials files need the package nkeys: pip install nkeys") from error
        except (nats_errors.Error, OSError) as error:
            raise BusUnavailable(f"NATS at {settings.shown} can't be used: {error}") from error
        finally:
            for task in (attempt, refused):
                task.cancel()
            await asyncio.gather(attempt, refused, return_exceptions=True)
        await self._client.subscribe(f"{self._echo_prefix}.*", cb=self._on_echo)
        self._set_state(ConnectionState.CONNECTED)

    def _why_unavailable(self) -> str:
        shown = self._settings.shown
        if self._refused.is_set():
            return f"NATS at {shown} refuses our credentials ({self._last_error}); check user, password and credentials"
        detail = f" (last error: {self._last_error})" if self._last_error is not None else ""
        return (
            f"no NATS server answers at {shown} within {self._settings.connect_timeout_s:g} s{detail}: "
            "start one with `nats-server -js`, or set HALFMOON_NATS_URL"
        )

    @property
    def is_connected(self) -> bool:
        return self._state is ConnectionState.CONNECTED

    @property
    def max_payload_bytes(self) -> int:
        limit_bytes: int = self._client.max_payload
        return limit_bytes

    def watch_connection(self, callback: Callable[[ConnectionState], None]) -> Callable[[], None]:
        key = object()
        self._watchers[key] = callback
        callback(self._state)
        return partial(self._forget_watcher, key)

    def _forget_watcher(self, key: object) -> None:
        self._watchers.pop(key, None)

    def new_inbox(self) -> str:
        return matching.new_inbox()

    async def publish(
        self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None, reply: str | None = None
    ) -> None:
        sent_headers = self._check(subject, data, headers)
        if reply is not None:
            matching.check_subject(reply)
        with _mapped(subject), _cancellation_kept():
            await self._client.publish(subject, data, reply=reply or "", headers=sent_headers)

    async def request(
        self, subject: str, data: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> BusMessage:
        sent_headers = self._check(subject, data, headers)
        with _mapped(subject, timeout_s), _cancellation_kept():
            return _message(await self._client.request(subject, data, timeout=timeout_s, headers=sent_headers))

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
        if self._closing:
            raise BusClosed("the bus is closed")
        matching.check_pattern(subject)
        matching.check_queue(queue)
        dispatcher = Dispatcher(
            subject, handler, concurrency=concurrency, max_pending=max_pending, max_pending_bytes=max_pending_bytes
        )

        async def receive(message: Msg) -> None:
            dispatcher.offer(_message(message), len(message.data))

        try:
            with _mapped(subject), _cancellation_kept():
                inner = await self._client.subscribe(subject, queue=queue or "", cb=receive)
                if self.is_connected:
                    await self._round_trip(_FLUSH_TIMEOUT_S)
        except BaseException:
            await dispatcher.stop()
            raise

        async def end_interest(gently: bool) -> None:
            self._subscriptions.discard(subscription)
            await self._end_interest(inner, gently)

        subscription = DispatchedSubscription(dispatcher, end_interest)
        self._subscriptions.add(subscription)
        return subscription

    async def _end_interest(self, inner: NatsSubscription, gently: bool) -> None:
        try:
            if gently and self.is_connected:
                # Drain removes the subscription at a PONG that may be older than its UNSUB (see _round_trip), and with
                # it messages that are on their way. So UNSUB first, and wait for it.
                await self._client._send_unsubscribe(inner._id)
                await self._round_trip(_FLUSH_TIMEOUT_S)
                await inner.drain()
            else:
                await inner.unsubscribe()
        except nats_errors.Error as error:
            _log.debug("unsubscribed without a connection", subject=inner.subject, error=str(error))

    async def ensure_stream(self, spec: StreamSpec) -> None:
        await self._jetstream.ensure_stream(spec)

    async def stream_publish(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        msg_id: str | None = None,
        timeout_s: float = 5.0,
    ) -> int:
        return await self._jetstream.publish(subject, data, headers=headers, msg_id=msg_id, timeout_s=timeout_s)

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
        consumption = Consumption(
            self._jetstream,
            stream,
            durable,
            filter_subject,
            handler,
            ack_wait_s=ack_wait_s,
            max_ack_pending=max_ack_pending,
            max_deliver=max_deliver,
            max_outstanding=max_outstanding,
        )
        await consumption.start()
        return self._keep(consumption)

    async def follow(
        self,
        stream: str,
        handler: FollowHandler,
        *,
        start_seq: int,
        on_gap: GapHandler,
        filter_subject: str | None = None,
    ) -> Subscription:
        following = Following(
            self._jetstream, stream, handler, start_seq=start_seq, on_gap=on_gap, filter_subject=filter_subject
        )
        await following.start()
        return self._keep(following)

    async def stream_last_seq(self, stream: str) -> int:
        return (await self._jetstream.bounds(stream)).last_seq

    async def stream_has(self, stream: str, seq: int) -> bool:
        return await self._jetstream.has(stream, seq)

    async def add_service(
        self, name: str, version: str, description: str = "", *, metadata: Mapping[str, str] | None = None
    ) -> MicroService:
        service = MicroService(name, version, description, metadata or {})
        await service.start(self)
        self._services.append(service)
        return service

    async def flush(self, timeout_s: float = 5.0) -> None:
        with _mapped("(flush)", timeout_s), _cancellation_kept():
            await self._round_trip(timeout_s)

    async def _round_trip(self, timeout_s: float) -> None:
        """Return once the server has handled all that was sent before: a message to ourselves comes back after it.

        nats-py's own flush writes its PING past what is still queued, so its PONG proves nothing about an earlier SUB,
        UNSUB or PUB.
        """
        back = asyncio.get_running_loop().create_future()
        subject = f"{self._echo_prefix}.{secrets.token_hex(8)}"
        self._echoes[subject] = back
        try:
            await self._client.publish(subject)
            async with asyncio.timeout(timeout_s):
                await back
        finally:
            del self._echoes[subject]

    async def _on_echo(self, message: Msg) -> None:
        back = self._echoes.get(message.subject)
        if back is not None and not back.done():
            back.set_result(None)

    async def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        if self._closing or self._draining:
            return
        self._draining = True
        try:
            await asyncio.gather(*(subscription.drain(timeout_s) for subscription in list(self._subscriptions)))
            if self.is_connected:
                with _mapped("(drain)", timeout_s):
                    await self._round_trip(max(0.1, min(timeout_s, _FLUSH_TIMEOUT_S)))
        finally:
            self._draining = False

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        for subscription in list(self._subscriptions):
            await subscription.unsubscribe()
        if self.is_connected:
            # Once the server knows that nobody listens here, requests fail at once instead of getting lost.
            await self._tidily(self._round_trip(_CLOSE_FLUSH_S))
        await self._tidily(self._client.close())
        self._set_state(ConnectionState.CLOSED)

    async def _tidily(self, step: Awaitable[None]) -> None:
        """One step of closing, which a broken connection can neither stop nor hold up."""
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await step
        except (TimeoutError, OSError, nats_errors.Error, AssertionError) as error:
            _log.debug("the connection to NATS ended untidily", error=str(error))

    def _keep(self, subscription: Subscription) -> Subscription:
        self._subscriptions = {kept for kept in self._subscriptions if kept.active}
        self._subscriptions.add(subscription)
        return subscription

    def _check(self, subject: str, data: bytes, headers: Mapping[str, str] | None) -> dict[str, str] | None:
        if self._closing:
            raise BusClosed("the bus is closed")
        matching.check_subject(subject)
        cleaned = matching.clean_headers(headers)
        matching.check_size(data, cleaned, self._client.max_payload)
        return cleaned or None

    def _set_state(self, state: ConnectionState) -> None:
        if state is self._state or self._state is ConnectionState.CLOSED:
            return
        self._state = state
        for callback in list(self._watchers.values()):
            callback(state)

    def _choose_server(self, pool: list[Server], _info: dict[str, object]) -> tuple[Server | None, float]:
        """nats-py's hook for reconnecting: any server, after a pause that doubles up to a limit, with full jitter."""
        self._num_attempts += 1
        ceiling = min(self._settings.reconnect_max_s, 0.05 * 2 ** min(self._num_attempts, 16))
        return random.choice(pool), random.uniform(0.0, ceiling)

    async def _on_error(self, error: Exception) -> None:
        self._last_error = error
        text = str(error).lower()
        if "authorization" in text or "authentication" in text:
            self._refused.set()
        if self._state is ConnectionState.CONNECTED:
            _log.warning("NATS reported an error", error=str(error) or type(error).__name__)

    async def _on_disconnected(self) -> None:
        if not self._closing:
            _log.warning("connection to NATS lost; reconnecting", url=self._settings.shown)
            self._set_state(ConnectionState.DISCONNECTED)

    async def _on_connected(self) -> None:
        self._num_attempts = 0
        _log.info("connection to NATS is back", url=self._settings.shown)
        self._set_state(ConnectionState.CONNECTED)

    async def _on_closed(self) -> None:
        if not self._closing:
            _log.error("NATS closed the connection for good", url=self._settings.shown, error=str(self._last_error))
            self._set_state(ConnectionState.CLOSED)


def _message(message: Msg) -> BusMessage:
    return BusMessage(message.subject, message.data, message.headers or {}, message.reply or None)


@contextmanager
def _mapped(subject: str, timeout_s: float = _FLUSH_TIMEOUT_S) -> Iterator[None]:
    """The one place where nats-py's exceptions become ours."""
    try:
        yield
    except nats_errors.NoRespondersError as error:
        raise NoResponders(subject) from error
    except (nats_errors.TimeoutError, TimeoutError) as error:
        raise BusTimeout(subject, timeout_s) from error
    except (nats_errors.ConnectionClosedError, nats_errors.ConnectionDrainingError) as error:
        raise BusClosed("the connection to NATS is closed") from error
    except nats_errors.OutboundBufferLimitError as error:
        raise BusDisconnected("the connection to NATS is down, and the send buffer is full") from error
    except (nats_errors.BadSubjectError, nats_errors.BadHeaderError) as error:
        raise BadSubject(f"{subject!r}: {error}") from error
    except nats_errors.Error as error:
        raise BusError(f"NATS failed on {subject!r}: {error}") from error


@contextmanager
def _cancellation_kept() -> Iterator[None]:
    """nats-py swallows a cancellation that comes while it flushes; raise it again."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    yield
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
