"""The conductors' part in copies: orders to pools to make more, and answers to pools that want to drop some.

Of several conductors one decides about a prefix: whoever wins the lot for its first chunk. Requests are shared out
among conductors, so each counts what it places itself, as many times as there are conductors.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

import structlog

from halfmoon.bus.endpoint import Endpoint, Envelope, call, serve
from halfmoon.bus.errors import BusError, RemoteError
from halfmoon.bus.protocol import Bus, ServiceRecord
from halfmoon.conductor.instruments import Instruments
from halfmoon.conductor.members import Members
from halfmoon.scheduling.continuations import Continuations
from halfmoon.scheduling.contract import Plan
from halfmoon.scheduling.copies import lot, surplus
from halfmoon.scheduling.index import ChunkIndex, Match
from halfmoon.scheduling.prefix import MAX_SOURCES
from halfmoon.scheduling.replication import Order, ReplicaPlanner, Run
from halfmoon.schemas import subjects
from halfmoon.schemas.copies import AskSurplus, Cause, Replicate, Replicating, Surplus
from halfmoon.schemas.ids import ChunkKey, NodeId, WorkerId
from halfmoon.schemas.kv_tier import ChunkSource, WantedChunk
from halfmoon.schemas.wire import Error, ErrorCode
from halfmoon.tasks import ended
from halfmoon.tracing import Context, attached, current

MAX_ASKED = 1024
MAX_PREFETCHED = 16
"""Chunks that are prefetched on account of one prompt."""
_MAX_SENDING = 64
_ORDER_TIMEOUT_S = 2.0
_QUEUE = "conductors"
_AT_ONCE = 8
_PINS_EVERY_S = 5.0


class Copies:
    """Owns orders under way. Its owner opens it, runs `run`, and closes it."""

    def __init__(
        self,
        bus: Bus,
        conductor: WorkerId,
        members: Members,
        index: Callable[[], ChunkIndex | None],
        planner: ReplicaPlanner,
        instruments: Instruments,
        log: structlog.stdlib.BoundLogger,
        *,
        prefetch_confidence: float = 1.0,
        pinned: Callable[[], Sequence[Run]] = tuple,
    ) -> None:
        """`index`: None while it isn't current. `prefetch_confidence`: 1 prefetches nothing. `pinned`: what is to have
        more than one copy however rarely it is used."""
        self._bus = bus
        self._conductor = conductor
        self._members = members
        self._index = index
        self._planner = planner
        self._instruments = instruments
        self._log = log
        self._confidence = prefetch_confidence
        self._pinned = pinned
        self._pins_due_s = 0.0
        self._continuations = Continuations()
        self._sending: set[asyncio.Task[None]] = set()
        self._endpoint: Endpoint | None = None

    async def open(self, record: ServiceRecord) -> None:
        """Answer pools from now on. Raises `BusError`."""
        counted = record.add_endpoint("surplus", subjects.SURPLUS, _QUEUE)
        self._endpoint = await serve(
            self._bus, subjects.SURPLUS, AskSurplus, self.surplus, queue=_QUEUE, concurrency=_AT_ONCE, record=counted
        )

    async def run(self, every_s: float) -> None:
        """Never returns."""
        while True:
            await asyncio.sleep(every_s)
            self.look(time.monotonic())

    async def close(self) -> None:
        """Idempotent."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await endpoint.unsubscribe()
        await ended(*self._sending)

    def placed(self, keys: Sequence[ChunkKey], match: Match, plan: Plan) -> None:
        """A prompt with these whole chunks is being placed. Sends what that asks for at once; runs in its trace."""
        now_s = time.monotonic()
        card = plan.card
        num_bytes = card.payload_bytes(card.chunk_tokens)
        run = Run(tuple(keys[: len(match)]), card.chunk_tokens, num_bytes)
        conductors = self._members.conductors() | {self._conductor}
        if not run.keys:
            pass
        elif self._decides(run.keys[0], conductors):
            self._planner.used(run, now_s, weight=len(conductors))
        else:
            self._planner.demand.use(run.keys, now_s, weight=len(conductors))
        if plan.replication is not None:
            self.order(
                Run(run.keys[: plan.replication.num_chunks], run.num_tokens, num_bytes),
                plan.replication.destination,
                Cause.OVERLOAD,
                first=plan.replication.source,
            )
        if self._confidence < 1.0:
            self._prefetch(keys, plan, num_bytes)

    def order(
        self, run: Run, destination: NodeId, cause: Cause, *, begin: int = 0, first: NodeId | None = None
    ) -> bool:
        """Have a node bring what it lacks of a run, from chunk `begin` on; whether it is asked to.

        For whoever knows a reason for a copy: a policy whose plan names one, `placed` for what is likely to follow. The
        bounds are the same as for demand: copies of a chunk, room at the node, bytes it may be sent in a second. Call
        it inside the span of the request on whose account it is; the order is sent by a task, so nothing is awaited.
        What is prefetched may also come from the node's own SSD. `first`: the node to be asked first for the chunks.
        """
        index, now_s = self._index(), time.monotonic()
        pool = self._members.pools().get(destination)
        if index is None or pool is None or not pool.can_hold(run):
            return False
        keys = run.keys[begin:]
        match = index.match(keys, self._members.cluster().nodes)
        positions: list[int] = []
        for at, holders in enumerate(self._planner.expected(keys, match.holders)):
            if len(positions) >= pool.room:
                break
            if destination in holders:
                is_below = cause is Cause.PREFETCH and any(destination in nodes for nodes in match.on_ssd[at : at + 1])
                if not is_below or self._planner.is_coming(keys[at], destination):
                    continue
            elif len(holders) >= self._planner.limits.max_copies:
                break
            positions.append(begin + at)
        order = Order(run, tuple(positions), destination)
        if not positions or not self._planner.allow(order, now_s):
            return False
        self._send(order, cause, index, first=first)
        return True

    def look(self, now_s: float) -> None:
        """One pass over what has become hot, and what is pinned."""
        index = self._index()
        if index is None:
            return
        cluster = self._members.cluster()
        conductors = self._members.conductors() | {self._conductor}
        pinned: list[Run] = []
        if now_s >= self._pins_due_s:
            self._pins_due_s = now_s + _PINS_EVERY_S
            pinned += (run for run in self._pinned() if self._decides(run.keys[0], conductors))

        orders = self._planner.orders(
            lambda keys: index.match(keys, cluster.nodes).holders,
            self._members.pools(),
            self._members.places(),
            now_s,
            pinned,
        )
        of_pins = {id(run) for run in pinned}
        for order in orders:
            self._send(order, Cause.PINNED if id(order.run) in of_pins else Cause.DEMAND, index)

    async def surplus(self, request: AskSurplus, envelope: Envelope) -> Surplus:
        """Which of a pool's chunks may go. Raises `RemoteError` where that isn't known now."""
        index, now_s = self._index(), time.monotonic()
        if index is None:
            message = "this conductor has no current index; ask again in a while"
            raise RemoteError(Error(code=ErrorCode.UNAVAILABLE, message=message))
        if len(request.keys) > MAX_ASKED:
            message = f"at most {MAX_ASKED} keys at a time, got {len(request.keys)}"
            raise RemoteError(Error(code=ErrorCode.INVALID_REQUEST, message=message))
        cluster = self._members.cluster()
        places = self._members.places()
        pinned = {key for run in self._pinned() for key in run.keys}
        going: list[ChunkKey] = []
        for key in request.keys:
            match = index.match((key,), cluster.nodes)
            in_dram = frozenset().union(*match.holders).difference(*match.on_ssd)
            if request.node in in_dram and len(in_dram) > 1:
                (wanted,) = self._planner.wanted((key,), now_s, pinned=key in pinned)
                if request.node in surplus(key, in_dram, wanted, places):
                    going.append(key)
        return Surplus(keys=tuple(going))

    def _prefetch(self, keys: Sequence[ChunkKey], plan: Plan, num_bytes: int) -> None:
        """What is likely to be asked for next where this prompt goes, and isn't in the prompt itself."""
        self._continuations.see(keys)
        if not plan.prefills:
            return
        destination = plan.prefills[0].worker.node
        for at in range(len(keys)):
            following = keys[at + 1] if at + 1 < len(keys) else None
            likely = self._continuations.likely(keys[at], self._confidence, MAX_PREFETCHED)
            if likely and likely[0] != following:
                run = Run((*keys[: at + 1], *likely), plan.card.chunk_tokens, num_bytes)
                self.order(run, destination, Cause.PREFETCH, begin=at + 1)

    def _decides(self, first_chunk: ChunkKey, conductors: frozenset[WorkerId]) -> bool:
        return max(conductors, key=lambda each: lot(first_chunk, NodeId(each))) == self._conductor

    def _send(self, order: Order, cause: Cause, index: ChunkIndex, *, first: NodeId | None = None) -> None:
        if len(self._sending) >= _MAX_SENDING:
            self._planner.failed(order)
            self._instruments.copies_ordered(cause, "refused", len(order.positions))
            return
        nodes = self._members.cluster().nodes
        chunks = tuple(self._wanted(order, at, index, nodes, first) for at in order.positions)
        context = current() if cause in (Cause.OVERLOAD, Cause.PREFETCH) else Context()
        task = asyncio.get_running_loop().create_task(self._tell(order, Replicate(chunks=chunks, cause=cause), context))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    def _wanted(
        self, order: Order, at: int, index: ChunkIndex, nodes: Mapping[NodeId, int], first: NodeId | None
    ) -> WantedChunk:
        key = order.run.keys[at]
        holders = next(iter(index.match((key,), nodes).holders), frozenset()) - {order.destination}
        # Not always the same one of them: what is hot is asked for by many.
        best = sorted(holders, key=lambda node: (node != first, lot(key, NodeId(f"{order.destination}/{node}"))))
        sources = tuple(ChunkSource(node=node, epoch=nodes[node]) for node in best[:MAX_SOURCES])
        return WantedChunk(
            key=key, index=at, num_tokens=order.run.num_tokens, num_bytes=order.run.num_bytes, sources=sources
        )

    async def _tell(self, order: Order, message: Replicate, context: Context) -> None:
        subject = f"{subjects.kv_tier(order.destination)}.replicate"
        count = len(order.positions)
        try:
            with attached(context):
                answer = await call(self._bus, subject, message, Replicating, timeout_s=_ORDER_TIMEOUT_S)
        except BusError as error:
            self._log.info("a copy could not be ordered", node=order.destination, error=str(error))
            self._planner.failed(order)
            self._instruments.copies_ordered(message.cause, "failed", count)
            return
        taken = answer.num_here + answer.num_queued
        self._instruments.copies_ordered(message.cause, "taken", taken)
        self._instruments.copies_ordered(message.cause, "refused", count - taken)
