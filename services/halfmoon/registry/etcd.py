"""etcd, reduced to what the registry needs: transactions and leases, each with a deadline. The only file that knows
`etcd3aio` and gRPC; their errors become ours here.

Each member of the etcd cluster has a channel of its own. A call that fails on one moves to the next, and stays there.

Transactions that only read are never cancelled, nor given a deadline that etcd would see: before 3.5.5 etcd panics, the
whole server, when a client gives one up while it is being carried out (https://github.com/etcd-io/etcd/issues/14110),
as many are at once when a stalled etcd goes on. We stop waiting instead, and let the call run out.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self, TypeAlias, TypeVar

import grpc
import grpc.aio
from etcd3aio.auth import AuthService
from etcd3aio.errors import (
    EtcdConnectionError,
    EtcdPermissionDeniedError,
    EtcdTransientError,
    EtcdUnauthenticatedError,
)
from etcd3aio.kv import KVService
from etcd3aio.lease import LeaseService

from halfmoon.registry.outstanding import Outstanding

T = TypeVar("T")

_MAX_UNANSWERED: Final = 256
"""Reads that may run on without anybody waiting for them; beyond that, etcd counts as unavailable."""
_CLOSE_S: Final = 2.0
_RETRY_PAUSE_S = 0.05
_MIN_ATTEMPTS = 3

_CHANNEL_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A page of placements is larger than gRPC's default of 4 MiB; the size of what we ask for bounds it.
    ("grpc.max_receive_message_length", -1),
    # Channels must not share a broken connection's backoff with an earlier client of the same process.
    ("grpc.use_local_subchannel_pool", 1),
)


class StoreUnavailable(Exception):
    """etcd did not do what was asked, in time. `reason` is short; the text says where, and what to do."""

    def __init__(self, endpoints: Sequence[str], reason: str) -> None:
        super().__init__(
            f"no etcd answers at {', '.join(endpoints)} ({reason}): start one or set HALFMOON_REGISTRY_ETCD_URL"
        )
        self.endpoints = tuple(endpoints)
        self.reason = reason


class StoreRefused(StoreUnavailable):
    """etcd answers, and won't: wrong credentials, no permission, a limit. Asking again doesn't help."""

    def __init__(self, endpoints: Sequence[str], reason: str) -> None:
        super().__init__(endpoints, reason)
        self.args = (f"etcd at {', '.join(endpoints)} refuses: {reason}",)


class RevisionGone(Exception):
    """The revision asked for was compacted away, or this etcd never had it."""


@dataclass(frozen=True, slots=True)
class Put:
    key: bytes
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    key: bytes


@dataclass(frozen=True, slots=True)
class Range:
    """Keys in [key, end), ascending; `end` None: the one key. `limit` 0: all. `revision` 0: the newest."""

    key: bytes
    end: bytes | None = None
    limit: int = 0
    revision: int = 0


@dataclass(frozen=True, slots=True)
class ValueIs:
    key: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class CreatedAt:
    """The key was created at this revision; 0: it doesn't exist."""

    key: bytes
    revision: int


Operation: TypeAlias = Put | Delete | Range
Guard: TypeAlias = ValueIs | CreatedAt


@dataclass(frozen=True, slots=True)
class KeyValue:
    key: bytes
    value: bytes
    create_revision: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a transaction."""

    succeeded: bool
    """Whether the guards held, so that `then` was done; otherwise `otherwise` was."""
    revision: int
    ranges: tuple[tuple[KeyValue, ...], ...]
    """The answers to the branch's `Range`s, in their order."""
    more: tuple[bool, ...]
    """For each of them: whether its limit cut it short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM contents. Without an authority the system's are trusted."""

    authority: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = None


def prefix_end(prefix: bytes) -> bytes:
    """The first key after all that start with `prefix`."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else b"\0"


class _Endpoint:
    def __init__(self, address: str, tls: TlsFiles | None) -> None:
        target = f"dns:///{address}"
        if tls is None:
            self.channel = grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
        else:
            credentials = grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)
            self.channel = grpc.aio.secure_channel(target, credentials, options=_CHANNEL_OPTIONS)
        # One attempt a call: which endpoint comes next, and when to stop, is decided here and not in the library.
        self.kv = KVService(self.channel, max_attempts=1)
        self.lease = LeaseService(self.channel, max_attempts=1)
        self.auth = AuthService(self.channel, max_attempts=1)

    def set_token(self, token: str) -> None:
        for service in (self.kv, self.lease):
            service.set_token(token)


class Etcd:
    """A client of one etcd cluster. Opens connections when first used; `close` is idempotent."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        tls: TlsFiles | None = None,
        user: str | None = None,
        password: str | None = None,
    ) -> None:
        self.endpoints = tuple(endpoints)
        self._tls = tls
        self._user = user
        self._password = password
        self._token: str | None = None
        self._opened: dict[str, _Endpoint] = {}
        self._reads = Outstanding(_MAX_UNANSWERED)
        self._preferred = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._reads.close(_CLOSE_S)
        opened, self._opened = self._opened, {}
        for endpoint in opened.values():
            await endpoint.channel.close()

    async def transact(
        self,
        guards: Sequence[Guard],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        timeout_s: float,
    ) -> Outcome:
        """One transaction: all of `then` where all guards hold, else all of `otherwise`.

        It may be carried out although this raises, and then also later: guard what must not happen twice.
        Raises `StoreUnavailable`, `StoreRefused`, `RevisionGone`.
        """
        compare = [_compare(guard) for guard in guards]
        success = [_operation(operation) for operation in then]
        failure = [_operation(operation) for operation in otherwise]

        writes = any(isinstance(operation, Put | Delete) for operation in (*then, *otherwise))

        async def call(endpoint: _Endpoint, attempt_s: float) -> Outcome:
            if writes:
                reply = await endpoint.kv.txn(compare=compare, success=success, failure=failure, timeout=attempt_s)
            else:
                reading = endpoint.kv.txn(compare=compare, success=success, failure=failure)
                reply = await self._reads.wait(reading, attempt_s)
            found = [each.response_range for each in reply.responses if each.HasField("response_range")]
            return Outcome(
                succeeded=bool(reply.succeeded),
                revision=int(reply.header.revision),
                ranges=tuple(tuple(KeyValue(kv.key, kv.value, kv.create_revision) for kv in one.kvs) for one in found),
                more=tuple(bool(one.more) for one in found),
            )

        return await self._call(call, timeout_s)

    async def grant(self, ttl_s: int, *, timeout_s: float) -> int:
        """A new lease: what is put under it goes when it isn't renewed for `ttl_s`."""

        async def call(endpoint: _Endpoint, attempt_s: float) -> int:
            return int((await endpoint.lease.grant(ttl_s, timeout=attempt_s)).ID)

        return await self._call(call, timeout_s)

    async def keep_alive(self, lease: int, *, timeout_s: float) -> bool:
        """Renew a lease once. False where it has run out."""

        async def call(endpoint: _Endpoint, attempt_s: float) -> bool:
            stream = endpoint.lease.keep_alive(lease)
            try:
                async with asyncio.timeout(attempt_s):
                    async for reply in stream:
                        return bool(reply.TTL > 0)
            finally:
                stream.cancel()
            return False

        return await self._call(call, timeout_s)

    async def revoke(self, lease: int, *, timeout_s: float) -> None:
        """End a lease, and delete all under it. Nothing happens where it has run out already."""

        async def call(endpoint: _Endpoint, attempt_s: float) -> None:
            try:
                await endpoint.lease.revoke(lease, timeout=attempt_s)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise

        await self._call(call, timeout_s)

    async def _call(self, call: Callable[[_Endpoint, float], Awaitable[T]], timeout_s: float) -> T:
        """Try the endpoints in turn until one answers or the time is up. A refusal is an answer."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        reason = "not tried"
        authenticated = False
        for attempt in range(max(_MIN_ATTEMPTS, len(self.endpoints))):
            left_s = deadline_s - loop.time()
            if left_s <= 0:
                break
            untried = max(1, len(self.endpoints) - attempt)
            try:
                endpoint = self._endpoint()
                if self._user is not None and (self._token is None or authenticated):
                    await self._authenticate(endpoint, left_s)
                return await call(endpoint, left_s / untried)
            except EtcdUnauthenticatedError as error:
                if self._user is None or authenticated:
                    raise StoreRefused(self.endpoints, _plain(error)) from error
                authenticated = True
                continue
            except EtcdPermissionDeniedError as error:
                raise StoreRefused(self.endpoints, _plain(error)) from error
            except (EtcdConnectionError, EtcdTransientError, TimeoutError) as error:
                reason = _plain(error) or f"no answer within {left_s / untried:.1f} s"
            except grpc.aio.AioRpcError as error:
                reason = self._interpret(error)
            self._preferred = (self._preferred + 1) % len(self.endpoints)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline_s):
                    await asyncio.sleep(_RETRY_PAUSE_S)
        raise StoreUnavailable(self.endpoints, reason)

    def _interpret(self, error: grpc.aio.AioRpcError) -> str:
        """Raise where the answer is final; otherwise the reason to try again."""
        detail: str = error.details() or error.code().name
        match error.code():
            case grpc.StatusCode.OUT_OF_RANGE if "revision" in detail:
                raise RevisionGone(detail) from error
            case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED | grpc.StatusCode.CANCELLED:
                return detail
            case grpc.StatusCode.RESOURCE_EXHAUSTED if "too many requests" in detail:
                return detail
            case grpc.StatusCode.INVALID_ARGUMENT if "too many operations" in detail:
                raise StoreRefused(
                    self.endpoints,
                    f"{detail}: start etcd with --max-txn-ops 1024, or lower HALFMOON_REGISTRY_ETCD_MAX_TXN_OPS",
                ) from error
            case grpc.StatusCode.INVALID_ARGUMENT if "user" in detail or "auth" in detail:
                raise StoreRefused(
                    self.endpoints,
                    f"{detail}: check HALFMOON_REGISTRY_ETCD_USER and HALFMOON_REGISTRY_ETCD_PASSWORD",
                ) from error
            case _:
                raise StoreRefused(self.endpoints, detail) from error

    def _endpoint(self) -> _Endpoint:
        address = self.endpoints[self._preferred]
        if address not in self._opened:
            self._opened[address] = _Endpoint(address, self._tls)
            if self._token is not None:
                self._opened[address].set_token(self._token)
        return self._opened[address]

    async def _authenticate(self, endpoint: _Endpoint, timeout_s: float) -> None:
        reply = await endpoint.auth.authenticate(self._user, self._password or "", timeout=timeout_s)
        self._token = str(reply.token)
        for opened in self._opened.values():
            opened.set_token(self._token)


def _compare(guard: Guard) -> object:
    match guard:
        case ValueIs(key, value):
            return KVService.txn_compare_value(key, value)
        case CreatedAt(key, revision):
            return KVService.txn_compare_create_revision(key, revision)


def _operation(operation: Operation) -> object:
    match operation:
        case Put(key, value, lease):
            return KVService.txn_op_put(key, value, lease=lease)
        case Delete(key):
            return KVService.txn_op_delete(key)
        case Range(key, end, limit, revision):
            request = KVService.txn_op_get(key, range_end=end, revision=revision)
            request.request_range.limit = limit
            return request


def _plain(error: BaseException) -> str:
    """The core of gRPC's message: what follows its last preamble."""
    text = str(error)
    if text.endswith(")") and "(" in text:
        text = text[text.index("(") + 1 : -1]
    return text.rsplit(": ", 1)[-1] if "last error:" in text else text
