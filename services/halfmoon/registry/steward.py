"""Takes operators' orders while this registry leads: writes them to etcd, then tells every node and worker.

    flush   etcd ──→ workers: forget ──→ nodes: flush ──→ counts
    pin     etcd ──→ nodes: pin ──→ counts

Workers before nodes: what a worker computes after it has forgotten rests on nothing flushed, and for what it began
before, it has asked its node for room, which then knows it. Whoever doesn't answer is told again once its heartbeats
show that it is behind, for as long as they do.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeVar

import structlog

from halfmoon.bus.endpoint import Endpoint, Envelope, announce, call, serve
from halfmoon.bus.errors import BusError, RemoteError
from halfmoon.bus.protocol import Bus
from halfmoon.chunks.keys import KEY_BYTES
from halfmoon.chunks.selection import coalesce
from halfmoon.registry.config import RegistryConfig
from halfmoon.registry.etcd import StoreUnavailable
from halfmoon.registry.members import MemberTable
from halfmoon.registry.orders import Change, OrderBook, TooManyPins
from halfmoon.registry.store import Store
from halfmoon.registry.term import Deposed, OutOfStep, Term
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import NodeId, WorkerId
from halfmoon.schemas.kv_tier import CatchUp, ChunksFlushed, FlushChunks, PinChunks, PinsHeld, UnpinChunks
from halfmoon.schemas.members import NodeHeartbeat, WorkerHeartbeat
from halfmoon.schemas.orders import FlushOrder, Forget, Forgotten, Selection
from halfmoon.schemas.registry import Flush, Flushed, NodeFlush, NodePins, Pin, PinsChanged, Unpin, WorkerFlush
from halfmoon.schemas.wire import Error, ErrorCode, Message

M = TypeVar("M", bound=Message)
A = TypeVar("A")
R = TypeVar("R")

QUEUE_GROUP: Final = "registry-leader"
MAX_KEYS: Final = 4096
"""In one order."""
TOLD_AT_ONCE: Final = 32
LOOK_EVERY_S: Final = 0.25
PATIENCE_S: Final = 1.0
"""Heartbeats may be so much older than an order before their sender counts as behind."""
AWAY: Final = "it is away; it is told when it is back"


class Steward:
    """One term's. `run` is its one task: it serves the three verbs for as long as it isn't cancelled."""

    def __init__(
        self,
        bus: Bus,
        store: Store,
        term: Term,
        table: MemberTable,
        config: RegistryConfig,
        log: structlog.stdlib.BoundLogger,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._bus = bus
        self._store = store
        self._term = term
        self._table = table
        self._config = config
        self._log = log
        self._now_ns = now_ns
        self._book: OrderBook | None = None
        """None: to be read from etcd first."""
        self._changing = asyncio.Lock()
        self._deposed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._last_order_s = 0.0
        self._reminded_s: dict[WorkerId, float] = {}

    async def run(self) -> None:
        """Raises `Deposed`, and BusError where the verbs can't be served."""
        endpoints: list[Endpoint] = []
        try:
            endpoints.append(await self._offer("flush", Flush, self.flush))
            endpoints.append(await self._offer("pin", Pin, self.pin))
            endpoints.append(await self._offer("unpin", Unpin, self.unpin))
            while not self._deposed.done():
                await asyncio.wait([self._deposed], timeout=LOOK_EVERY_S)
                await self._remind()
            self._deposed.result()
        finally:
            for endpoint in endpoints:
                await endpoint.unsubscribe()

    async def flush(self, message: Flush, envelope: Envelope) -> Flushed:
        _check(message.selection)
        async with self._changing:
            book = await self._read()
            order, change = book.plan_flush(message.selection, self._now_ns(), self._config.flush_lifetime_s)
            await self._write(book, change)
        self._log.info("flush", seq=order.seq, selection=_words(message.selection))
        workers, nodes = self._present()
        told_workers = await self._tell(workers, lambda beat: self._forget(beat.worker, order))
        told_nodes = await self._tell(
            nodes, lambda beat: self._flush(beat.node, FlushChunks(order=order, unpin=change.drop_pins))
        )
        told_nodes += [NodeFlush(node=node, error=AWAY) for node in await self._away(nodes)]
        return Flushed(
            seq=order.seq,
            before_ns=order.before_ns,
            nodes=tuple(sorted(told_nodes, key=lambda each: each.node)),
            workers=tuple(sorted(told_workers, key=lambda each: each.worker)),
            num_unpinned=len(change.drop_pins),
        )

    async def pin(self, message: Pin, envelope: Envelope) -> PinsChanged:
        _check(Selection(keys=tuple(pin.key for pin in message.chunks)))
        async with self._changing:
            book = await self._read()
            try:
                change = book.plan_pins(message.chunks, self._now_ns(), self._config.max_pins)
            except TooManyPins as error:
                raise _refusal(ErrorCode.NO_SPACE, str(error)) from error
            await self._write(book, change)
        keys = tuple(dict.fromkeys(pin.key for pin in message.chunks))
        return await self._tell_pins(book, change, len(change.put_pins), PinChunks(seq=change.seq, keys=keys))

    async def unpin(self, message: Unpin, envelope: Envelope) -> PinsChanged:
        _check(message.selection)
        async with self._changing:
            book = await self._read()
            change = book.plan_unpin(message.selection, self._now_ns())
            await self._write(book, change)
        order = UnpinChunks(seq=change.seq, keys=change.drop_pins)
        return await self._tell_pins(book, change, len(change.drop_pins), order)

    async def _tell_pins(
        self, book: OrderBook, change: Change, num_changed: int, order: PinChunks | UnpinChunks
    ) -> PinsChanged:
        _, nodes = self._present()
        told = await self._tell(nodes, lambda beat: self._change_pins(beat.node, order))
        told += [NodePins(node=node, error=AWAY) for node in await self._away(nodes)]
        return PinsChanged(
            seq=change.seq,
            num_changed=num_changed,
            num_pins=len(book.pins),
            nodes=tuple(sorted(told, key=lambda each: each.node)),
        )

    async def _read(self) -> OrderBook:
        if self._book is None:
            try:
                self._book = await self._store.orders(self._config.etcd_timeout_s)
            except StoreUnavailable as error:
                raise _refusal(ErrorCode.UNAVAILABLE, str(error)) from error
        return self._book

    async def _write(self, book: OrderBook, change: Change) -> None:
        if change.seq == book.seq:
            return
        try:
            await self._term.write_orders(change, book.seq)
        except Deposed as error:
            if not self._deposed.done():
                self._deposed.set_exception(error)
            raise _refusal(ErrorCode.UNAVAILABLE, "another registry leads now: try again") from error
        except (OutOfStep, StoreUnavailable) as error:
            self._book = None
            raise _refusal(
                ErrorCode.UNAVAILABLE, f"it isn't certain that the order was written: try again ({error})"
            ) from error
        book.apply(change)
        self._last_order_s = asyncio.get_running_loop().time()

    def _present(self) -> tuple[list[WorkerHeartbeat], list[NodeHeartbeat]]:
        beats = self._table.present()
        newest: dict[NodeId, NodeHeartbeat] = {}
        for beat in beats:
            if isinstance(beat, NodeHeartbeat) and (beat.node not in newest or newest[beat.node].epoch < beat.epoch):
                newest[beat.node] = beat
        return [beat for beat in beats if isinstance(beat, WorkerHeartbeat)], list(newest.values())

    async def _away(self, nodes: Iterable[NodeHeartbeat]) -> list[NodeId]:
        """Nodes that etcd remembers, and that aren't there."""
        try:
            known = await self._store.nodes(self._config.etcd_timeout_s)
        except StoreUnavailable:
            return []
        return sorted(known - {beat.node for beat in nodes})

    async def _tell(self, members: Sequence[A], tell: Callable[[A], Awaitable[R]]) -> list[R]:
        gate = asyncio.Semaphore(TOLD_AT_ONCE)

        async def one(member: A) -> R:
            async with gate:
                return await tell(member)

        return list(await asyncio.gather(*(one(member) for member in members)))

    async def _flush(self, node: NodeId, order: FlushChunks) -> NodeFlush:
        try:
            done = await self._ask_node(node, "flush", order, ChunksFlushed)
        except BusError as error:
            return NodeFlush(node=node, error=str(error))
        return NodeFlush(node=node, tiers=done.tiers, num_leased=done.num_leased)

    async def _forget(self, worker: WorkerId, order: FlushOrder) -> WorkerFlush:
        try:
            done = await call(
                self._bus,
                subjects.forget(worker),
                Forget(order=order),
                Forgotten,
                timeout_s=self._config.orders_timeout_s,
            )
        except BusError as error:
            return WorkerFlush(worker=worker, error=str(error))
        return WorkerFlush(worker=worker, num_chunks=done.num_chunks)

    async def _change_pins(self, node: NodeId, order: PinChunks | UnpinChunks) -> NodePins:
        verb = "pin" if isinstance(order, PinChunks) else "unpin"
        try:
            held = await self._ask_node(node, verb, order, PinsHeld)
        except BusError as error:
            return NodePins(node=node, error=str(error))
        return NodePins(
            node=node,
            num_pinned=held.num_pinned,
            num_absent=held.num_absent,
            num_refused=held.num_refused,
            max_slots=held.max_slots,
        )

    async def _ask_node(self, node: NodeId, verb: str, message: Message, reply: type[M]) -> M:
        subject = f"{subjects.kv_tier(node)}.{verb}"
        return await call(self._bus, subject, message, reply, timeout_s=self._config.orders_timeout_s)

    async def _remind(self) -> None:
        """Tell those that are behind: they were away, or an answer of theirs was lost."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._last_order_s < PATIENCE_S:
            return
        try:
            async with self._changing:
                book = await self._read()
        except RemoteError:
            return
        workers, nodes = self._present()
        behind = {beat.worker: beat for beat in nodes if beat.orders_seq < book.seq}
        forgetful = {beat.worker: order for beat in workers if (order := _missed(book, beat)) is not None}
        waiting = behind.keys() | forgetful.keys()
        self._reminded_s = {worker: at_s for worker, at_s in self._reminded_s.items() if worker in waiting}
        for worker in waiting:
            if now_s - self._reminded_s.get(worker, 0.0) < PATIENCE_S:
                continue
            self._reminded_s[worker] = now_s
            try:
                if worker in behind:
                    await announce(self._bus, f"{subjects.kv_tier(behind[worker].node)}.catch_up", CatchUp())
                else:
                    await announce(self._bus, subjects.forget(worker), Forget(order=forgetful[worker]))
            except BusError as error:
                self._log.debug("a member can't be reminded", worker=worker, error=str(error))

    async def _offer(self, verb: str, inbox: type[M], handler: Callable[[M, Envelope], Awaitable[Message]]) -> Endpoint:
        return await serve(self._bus, subjects.registry(verb), inbox, handler, queue=QUEUE_GROUP, concurrency=4)


def _missed(book: OrderBook, beat: WorkerHeartbeat) -> FlushOrder | None:
    """Flushes in a worker's life that it hasn't heard of, as one."""
    orders = [order for order in book.flushes_after(beat.orders_seq) if order.before_ns > beat.started_ns]
    return coalesce(orders, 1)[0] if orders else None


def _check(selection: Selection) -> None:
    """Raises `RemoteError`."""
    if selection.is_empty:
        raise _refusal(
            ErrorCode.INVALID_REQUEST, "nothing is selected: name a tenant, a model, keys or prefixes, or everything"
        )
    keys = (*selection.keys, *selection.prefixes)
    if len(keys) > MAX_KEYS:
        raise _refusal(ErrorCode.INVALID_REQUEST, f"at most {MAX_KEYS} keys, got {len(keys)}: ask in parts")
    for key in keys:
        if len(key) != KEY_BYTES:
            raise _refusal(ErrorCode.INVALID_REQUEST, f"a chunk key is {KEY_BYTES} bytes, got one of {len(key)}")


def _words(selection: Selection) -> str:
    """For the log."""
    named = [f"{name} {value}" for name in ("tenant", "model") if (value := getattr(selection, name)) is not None]
    counted = [f"{len(keys)} {name}" for name in ("keys", "prefixes") if (keys := getattr(selection, name))]
    return ", ".join([*named, *counted]) or "everything"


def _refusal(code: ErrorCode, message: str) -> RemoteError:
    return RemoteError(Error(code=code, message=message))
