"""The registry's shell: three questions on the bus, heartbeats, and a candidacy."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Final, TypeVar

from halfmoon.bus.endpoint import Endpoint, Envelope, serve
from halfmoon.bus.errors import BusError, BusUnavailable, RemoteError
from halfmoon.bus.protocol import ServiceRecord
from halfmoon.bus.streams import CHUNKS
from halfmoon.lifecycle import VERSION, Runtime, StartupError
from halfmoon.registry.config import RegistryConfig, etcd_endpoints, etcd_uses_tls
from halfmoon.registry.etcd import Etcd, RevisionGone, StoreUnavailable, TlsFiles
from halfmoon.registry.leader import Leader
from halfmoon.registry.membership import Membership
from halfmoon.registry.store import MAX_PAGE_PLACEMENTS, Store
from halfmoon.schemas import subjects
from halfmoon.schemas.members import MemberState, ServiceHeartbeat
from halfmoon.schemas.registry import (
    LookedUp,
    Lookup,
    MemberList,
    Members,
    Orders,
    Snapshot,
    SnapshotPage,
    StandingOrders,
)
from halfmoon.schemas.wire import Error, ErrorCode, Message
from halfmoon.tasks import ended
from halfmoon.tracing.metrics import LATENCY_BUCKETS_S

M = TypeVar("M", bound=Message)
T = TypeVar("T")

QUEUE_GROUP: Final = "registry"
MAX_LOOKUP_KEYS: Final = 1024
KEY_BYTES: Final = 32
CONCURRENT_ANSWERS: Final = 64
DOWN_FOR_S: Final = 0.5
"""After etcd has not answered in time, questions are refused at once for this long, so that none queues up behind."""


class Registry:
    """Answers `lookup`, `snapshot`, `members` and `orders`; follows the stream, and takes orders, while it leads."""

    def __init__(self, runtime: Runtime[RegistryConfig]) -> None:
        self._runtime = runtime
        self._config = runtime.config
        self._bus = runtime.bus
        self._log = runtime.log
        self._tracer = runtime.telemetry.tracer
        self._state = MemberState.LOADING
        self._store: Store | None = None
        self._membership: Membership | None = None
        self._record: ServiceRecord | None = None
        self._endpoints: list[Endpoint] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._down_until_s = 0.0
        self.leader: Leader | None = None
        self._latency = runtime.metrics.histogram(
            "registry_request", "Time to answer, by verb and outcome.", ["verb", "outcome"], buckets=LATENCY_BUCKETS_S
        )

    async def start(self) -> None:
        store = self._store = self._open_store()
        try:
            await store.check(self._config.etcd_connect_timeout_s)
        except StoreUnavailable as error:
            raise StartupError(str(error)) from error
        try:
            await self._bus.ensure_stream(CHUNKS)
        except BusUnavailable:
            raise
        except BusError as error:
            raise StartupError(str(error)) from error
        runtime = self._runtime
        leader = self.leader = Leader(
            worker=runtime.worker_id,
            store=store,
            bus=self._bus,
            config=self._config,
            metrics=runtime.metrics,
            log=self._log,
        )
        membership = self._membership = Membership(
            self._bus, leads=leader.leads, metrics=runtime.metrics, log=self._log
        )
        await membership.start()
        await self._serve()
        self._spawn(membership.watch(), "members")
        self._spawn(leader.run(membership), "leader")
        self._state = MemberState.SERVING

    async def drain(self) -> None:
        """Hand the leadership on, and answer what was asked."""
        self._state = MemberState.DRAINING
        await self._end_tasks()
        for endpoint in self._endpoints:
            await endpoint.drain(self._config.drain_timeout_s)

    async def stop(self) -> None:
        self._state = MemberState.DRAINING
        await self._end_tasks()
        endpoints, self._endpoints = self._endpoints, []
        for endpoint in endpoints:
            await endpoint.unsubscribe()
        if self._membership is not None:
            await self._membership.stop()
        if self._record is not None:
            await self._record.stop()
        if self._store is not None:
            await self._store.close()

    def heartbeat(self) -> ServiceHeartbeat:
        return ServiceHeartbeat(
            worker=self._runtime.worker_id,
            service="registry",
            started_ns=self._runtime.started_ns,
            state=self._state,
            pid=os.getpid(),
        )

    async def lookup(self, message: Lookup, envelope: Envelope) -> LookedUp:
        if len(message.keys) > MAX_LOOKUP_KEYS:
            raise _refusal(f"a lookup takes at most {MAX_LOOKUP_KEYS} keys, got {len(message.keys)}: ask in parts")
        for key in message.keys:
            if len(key) != KEY_BYTES:
                raise _refusal(f"a chunk key is {KEY_BYTES} bytes, got one of {len(key)}")
        with self._tracer.span("registry.lookup", attributes={"halfmoon.num_keys": len(message.keys)}) as span:
            found = await self._answer("lookup", lambda store, s: store.lookup(message.keys, s), envelope)
            span.set_attribute("halfmoon.num_found", sum(1 for placements in found if placements))
        return LookedUp(placements=found)

    async def snapshot(self, message: Snapshot, envelope: Envelope) -> SnapshotPage:
        if not message.limit >= 1:
            raise _refusal(f"a page's limit is from 1 to {MAX_PAGE_PLACEMENTS}, got {message.limit}")
        if (message.cursor is None) != (message.revision is None) or (message.revision or 1) < 1:
            raise _refusal("the first page takes neither cursor nor revision; later ones take those of the page before")
        try:
            return await self._answer(
                "snapshot",
                lambda store, s: store.snapshot(message.cursor, message.revision, message.limit, s),
                envelope,
            )
        except RevisionGone as error:
            raise RemoteError(
                Error(
                    code=ErrorCode.STALE,
                    message=f"revision {message.revision} is not kept any more: start again from the first page",
                )
            ) from error

    async def orders(self, message: Orders, envelope: Envelope) -> StandingOrders:
        book = await self._answer("orders", lambda store, s: store.orders(s), envelope)
        return StandingOrders(
            seq=book.seq, flushes=tuple(book.flushes_after(message.after)), pins=tuple(book.pins.values())
        )

    async def members(self, _: Members, envelope: Envelope) -> MemberList:
        return await self._answer("members", lambda store, s: store.members(s), envelope)

    async def _answer(self, verb: str, ask: Callable[[Store, float], Awaitable[T]], envelope: Envelope) -> T:
        """Ask the store, within the caller's deadline and ours; what etcd can't answer becomes `unavailable`."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        outcome = "ok"
        try:
            assert self._store is not None
            if started_s < self._down_until_s:
                raise StoreUnavailable(self._store.endpoints, "it did not a moment ago")
            left_s = envelope.remaining_s()
            limit_s = self._config.lookup_timeout_s
            return await ask(self._store, limit_s if left_s is None else min(limit_s, left_s))
        except StoreUnavailable as error:
            outcome = "unavailable"
            if started_s >= self._down_until_s:
                self._down_until_s = loop.time() + DOWN_FOR_S
            raise RemoteError(
                Error(code=ErrorCode.UNAVAILABLE, message=str(error), retry_after_s=DOWN_FOR_S)
            ) from error
        except RevisionGone:
            outcome = "stale"
            raise
        finally:
            self._latency.labels(verb, outcome).observe(loop.time() - started_s)

    async def _serve(self) -> None:
        self._record = await self._bus.add_service(
            "halfmoon-registry", VERSION, "Who has which chunk, and who is there."
        )
        await self._offer("lookup", Lookup, self.lookup)
        await self._offer("snapshot", Snapshot, self.snapshot)
        await self._offer("members", Members, self.members)
        await self._offer("orders", Orders, self.orders)

    async def _offer(self, verb: str, inbox: type[M], handler: Callable[[M, Envelope], Awaitable[Message]]) -> None:
        assert self._record is not None
        subject = subjects.registry(verb)
        record = self._record.add_endpoint(verb, subject, QUEUE_GROUP)
        self._endpoints.append(
            await serve(
                self._bus,
                subject,
                inbox,
                handler,
                queue=QUEUE_GROUP,
                concurrency=CONCURRENT_ANSWERS,
                record=record,
            )
        )

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=f"registry-{name}")
        task.add_done_callback(self._on_task_end)
        self._tasks.append(task)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """These tasks run until they are cancelled: one that ends otherwise is a defect, and a restart is the cure."""
        if task.cancelled():
            return
        error = task.exception()
        self._log.error("a task ended", task=task.get_name(), exc_info=error)
        self._runtime.fail(f"{task.get_name()} ended: {error}")

    async def _end_tasks(self) -> None:
        tasks, self._tasks = self._tasks, []
        await ended(*tasks)

    def _open_store(self) -> Store:
        """Raises `StartupError` for settings that can't be used."""
        config = self._config
        try:
            endpoints = etcd_endpoints(config)
        except ValueError as error:
            raise StartupError(str(error)) from error
        if (config.etcd_cert is None) != (config.etcd_key is None):
            raise StartupError("etcd_cert and etcd_key go together: set both or neither")
        tls = None
        if etcd_uses_tls(config):
            tls = TlsFiles(
                authority=_read(config.etcd_ca), certificate=_read(config.etcd_cert), key=_read(config.etcd_key)
            )
        etcd = Etcd(endpoints, tls=tls, user=config.etcd_user, password=config.etcd_password)
        return Store(
            etcd,
            prefix=config.key_prefix,
            max_txn_ops=config.etcd_max_txn_ops,
            write_timeout_s=config.etcd_timeout_s,
        )


def _refusal(message: str) -> RemoteError:
    return RemoteError(Error(code=ErrorCode.INVALID_REQUEST, message=message))


def _read(path: Path | None) -> bytes | None:
    try:
        return path.read_bytes() if path is not None else None
    except OSError as error:
        raise StartupError(f"{path} can't be read: {error.strerror}") from error
