"""Standing for leader, and what the leader does: it alone follows the stream and writes.

campaign ──won──→ load state ─→ follow CHUNKS from applied + 1 ─→ write batches; members; nodes; sweep
   ↑                  ↑───────────── out of step ─────────────────────┘
   └───────────── deposed: the lease ran out, or could not be renewed in time
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TypeAlias

import structlog

from halfmoon.bus.endpoint import read_stream
from halfmoon.bus.errors import BusError, StreamGap
from halfmoon.bus.protocol import Bus
from halfmoon.bus.streams import CHUNKS
from halfmoon.machine import Machine
from halfmoon.registry.config import RegistryConfig
from halfmoon.registry.etcd import StoreUnavailable
from halfmoon.registry.membership import TICK_S, Membership
from halfmoon.registry.policy import NodeRecord, Step, after, plan_event, plan_nodes, plan_sweep, plan_swept, sweep_due
from halfmoon.registry.reconcile import Reconciler
from halfmoon.registry.state import ROLE_TABLE, Role, RoleEvent
from halfmoon.registry.steward import Steward
from halfmoon.registry.store import Store
from halfmoon.registry.term import Deposed, OutOfStep, Term
from halfmoon.schemas.chunks import ChunkEvent
from halfmoon.schemas.ids import NodeId, WorkerId
from halfmoon.tracing.metrics import Metrics

MAX_WAITING_EVENTS = 512
MAX_BATCH_EVENTS = 256
MAX_BATCH_STEPS = 1000
SWEEP_PAGE = 1000
CAMPAIGN_PAUSE_S = 0.5
RETRY_PAUSE_S = 0.2
MEMBERS_RECORDED_EVERY_S = 1.0

Arrival: TypeAlias = tuple[int, ChunkEvent] | StreamGap
"""What the follower hands over: an event with its sequence, or the news that events are missing."""


@dataclass(slots=True)
class _Sweep:
    """A pass over all placements. Other work goes on between its pages."""

    nodes: dict[NodeId, NodeRecord]
    """The nodes to be cleaned, with their records as the sweep found them."""
    cursor: bytes | None = None


@dataclass(slots=True)
class _Work:
    """What a leader knows; in step with etcd after each write."""

    term: Term
    reconciler: Reconciler
    applied_seq: int
    nodes: dict[NodeId, NodeRecord]
    arrivals: asyncio.Queue[Arrival] = field(default_factory=lambda: asyncio.Queue(MAX_WAITING_EVENTS))
    sweep: _Sweep | None = None


class Leader:
    """One registry's candidacy. `run` until cancelled; `role` says where it stands."""

    def __init__(
        self,
        *,
        worker: WorkerId,
        store: Store,
        bus: Bus,
        config: RegistryConfig,
        metrics: Metrics,
        log: structlog.stdlib.BoundLogger,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._worker = worker
        self._store = store
        self._bus = bus
        self._config = config
        self._log = log
        self._now_ns = now_ns
        self._retold = metrics.counter(
            "registry_retold_chunks", "Chunks that etcd and a node's inventory disagreed on, by how.", ["difference"]
        )
        self._machine: Machine[Role, RoleEvent] = Machine(ROLE_TABLE, Role.STANDBY)
        self._unresigned: Term | None = None
        """A term of ours that is over, but whose key may stand in etcd until its lease runs out."""
        self._listened_before_s = 0.0
        self._leading = metrics.gauge("registry_leading", "1 while this registry leads, else 0.")
        self._applied = metrics.gauge("registry_applied_sequence", "Last event of CHUNKS that this leader has written.")
        self._events = metrics.counter("registry_events", "Chunk events written to etcd.")
        self._retries = metrics.counter("registry_write_retries", "Writes to etcd that had to be tried again.")
        self._gaps = metrics.counter("registry_stream_gaps", "Times that events were gone before they were applied.")

    @property
    def role(self) -> Role:
        return self._machine.state

    def leads(self) -> bool:
        return self._machine.state is Role.LEADING

    def _differed(self, num_missing: int, num_stale: int, num_moved: int) -> None:
        self._retold.labels("missing").inc(num_missing)
        self._retold.labels("stale").inc(num_stale)
        self._retold.labels("wrong_tier").inc(num_moved)

    async def run(self, membership: Membership) -> None:
        """Stand for leader, lead, and stand again, until cancelled; then resign."""
        try:
            reachable = True
            while True:
                try:
                    if self._unresigned is not None:
                        await self._unresigned.resign()
                        self._unresigned = None
                    term = await self._store.campaign(self._worker, self._config.leader_ttl_s)
                    reachable = True
                except StoreUnavailable as error:
                    if reachable:
                        self._log.warning("can't stand for leader; trying on", error=str(error))
                    reachable, term = False, None
                if term is None:
                    await asyncio.sleep(CAMPAIGN_PAUSE_S)
                else:
                    await self._lead(term, membership)
        finally:
            self._machine.fire(RoleEvent.STOP)

    async def _lead(self, term: Term, membership: Membership) -> None:
        self._machine.fire(RoleEvent.ELECTED)
        self._leading.set(1)
        self._log.info("leading", worker=self._worker)
        reconciler = Reconciler(
            self._bus, term, every_s=self._config.reconcile_every_s, on_difference=self._differed, log=self._log
        )
        steward = Steward(self._bus, self._store, term, membership.table, self._config, self._log, self._now_ns)
        try:
            await _until_one_ends(
                term.hold(), self._work(term, membership, reconciler), reconciler.run(), self._take_orders(steward)
            )
        except Deposed as deposed:
            self._log.warning("no longer leading", reason=str(deposed))
        finally:
            self._machine.fire(RoleEvent.DEPOSED)
            self._leading.set(0)
            await self._resign(term)

    async def _take_orders(self, steward: Steward) -> None:
        while True:
            try:
                await steward.run()
            except BusError as error:
                self._log.warning("can't take operators' orders; trying on", error=str(error))
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _resign(self, term: Term) -> None:
        try:
            await term.resign()
        except StoreUnavailable as error:
            self._unresigned = term
            self._log.info("could not resign; the lease will run out", error=str(error))

    async def _work(self, term: Term, membership: Membership, reconciler: Reconciler) -> None:
        self._listened_before_s = membership.table.listened_s
        announced = False
        while True:
            try:
                state = await term.load()
                membership.table.recall(state.members)
                if not announced:
                    await membership.announce_all()
                    announced = True
                await self._follow(_Work(term, reconciler, state.applied_seq, state.nodes), membership)
            except OutOfStep:
                self._log.info("a write whose answer was lost had been carried out; reading the state again")
            except (StoreUnavailable, BusError) as error:
                self._log.warning("can't follow the stream; trying on", stream=CHUNKS.name, error=str(error))
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _follow(self, work: _Work, membership: Membership) -> None:
        """Read the stream from where etcd stands, until the stream breaks off (then it returns) or this raises."""

        async def arrive(seq: int, event: ChunkEvent) -> None:
            await work.arrivals.put((seq, event))

        await self._bus.ensure_stream(CHUNKS)
        try:
            subscription = await read_stream(
                self._bus, CHUNKS.name, ChunkEvent, arrive, start_seq=work.applied_seq + 1, on_gap=work.arrivals.put
            )
        except StreamGap as gap:
            await self._skip(work, gap)
            return
        try:
            await self._write_all(work, membership)
        finally:
            await subscription.unsubscribe()

    async def _write_all(self, work: _Work, membership: Membership) -> None:
        loop = asyncio.get_running_loop()
        tick_s = members_s = loop.time()
        while True:
            gap = await self._apply_batch(work, max(0.0, tick_s - loop.time()))
            if gap is not None:
                await self._skip(work, gap)
                return
            if loop.time() >= tick_s:
                tick_s = loop.time() + TICK_S
                await self._judge_nodes(work, membership)
                await self._sweep(work)
            if loop.time() >= members_s:
                members_s = loop.time() + MEMBERS_RECORDED_EVERY_S
                await self._record_members(work.term, membership)

    async def _apply_batch(self, work: _Work, wait_s: float) -> StreamGap | None:
        """Write what has arrived, in one go. Waits `wait_s` for the first event; a gap is returned."""
        steps: list[Step] = []
        nodes, seq, gap, num_events = work.nodes, work.applied_seq, None, 0
        try:
            async with asyncio.timeout(wait_s):
                arrival = await work.arrivals.get()
        except TimeoutError:
            return None
        while True:
            if isinstance(arrival, StreamGap):
                gap = arrival
                break
            seq, event = arrival
            planned = plan_event(event, nodes)
            nodes = after(nodes, planned) if planned else nodes
            steps += planned
            num_events += 1
            if work.sweep is not None and (record := nodes.get(event.node)) is not None and record.lost_ns is not None:
                # It may have put placements behind the sweep's back: forget it another time.
                work.sweep.nodes.pop(event.node, None)
            if num_events >= MAX_BATCH_EVENTS or len(steps) >= MAX_BATCH_STEPS or work.arrivals.empty():
                break
            arrival = work.arrivals.get_nowait()
        if num_events:
            await self._apply(work, steps, seq)
            self._events.inc(num_events)
        return gap

    async def _apply(self, work: _Work, steps: list[Step] | tuple[Step, ...], seq: int) -> None:
        """Write until it is written. Only being deposed ends it, since events must not be passed over."""
        warned = False
        while True:
            try:
                await work.term.apply(steps, seq)
                break
            except StoreUnavailable as error:
                self._retries.inc()
                if not warned:
                    self._log.warning("can't write; events wait in the stream", error=str(error))
                    warned = True
                await asyncio.sleep(RETRY_PAUSE_S)
        if warned:
            self._log.info("writing again", seq=seq)
        work.applied_seq = seq
        work.nodes = after(work.nodes, steps)
        self._applied.set(seq)

    async def _skip(self, work: _Work, gap: StreamGap) -> None:
        """Events are gone for good (the stream's limits, or a stream made anew). What they said is had back from the
        nodes' inventories."""
        self._gaps.inc()
        resume_seq = max(gap.first_seq, 1) - 1
        self._log.error(
            "chunk events were lost before they were applied: the nodes' inventories are compared; raise the "
            "stream's limits should this happen again",
            stream=gap.stream,
            needed_seq=gap.needed_seq,
            first_seq=gap.first_seq,
            last_seq=gap.last_seq,
        )
        await self._apply(work, (), resume_seq)
        work.reconciler.distrust_all()

    async def _judge_nodes(self, work: _Work, membership: Membership) -> None:
        table = membership.table
        work.reconciler.see(table.nodes_present(), work.nodes)
        steps = plan_nodes(
            work.nodes,
            table.nodes_present(),
            table.nodes_gone(),
            leading_s=table.listened_s - self._listened_before_s,
            grace_s=self._config.unheard_node_grace_s,
            now_ns=self._now_ns(),
        )
        if steps:
            await self._apply(work, steps, work.applied_seq)

    async def _record_members(self, term: Term, membership: Membership) -> None:
        """Not tried again: the next second brings fresh heartbeats."""
        gone = membership.take_gone()
        try:
            await term.record_members(membership.table.take_fresh(), gone, self._config.member_ttl_s)
        except StoreUnavailable as error:
            self._log.debug("members not recorded", error=str(error))

    async def _sweep(self, work: _Work) -> None:
        """One page of deleting what no reader is told of any more."""
        forget_after_s, now_ns = self._config.forget_node_after_s, self._now_ns()
        if work.sweep is None:
            due = sweep_due(work.nodes, forget_after_s=forget_after_s, now_ns=now_ns)
            if not due:
                return
            work.sweep = _Sweep({node: work.nodes[node] for node in due})
        sweep = work.sweep
        placements, cursor = await work.term.page(sweep.cursor, SWEEP_PAGE)
        steps = plan_sweep(placements, work.nodes, forget_after_s=forget_after_s, now_ns=now_ns)
        if cursor is None:
            steps += plan_swept(sweep.nodes, work.nodes, forget_after_s=forget_after_s, now_ns=now_ns)
            work.sweep = None
        if steps:
            await self._apply(work, steps, work.applied_seq)
        sweep.cursor = cursor


async def _until_one_ends(*work: Coroutine[None, None, None]) -> None:
    """Run all until one fails; the others are cancelled, and its error is raised.

    Not a task group: before Python 3.13, one whose task fails just as it is cancelled from outside reports the failure
    and loses the cancellation, and a registry that is stopped at that moment would never end.
    """
    tasks = [asyncio.create_task(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
