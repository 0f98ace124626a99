"""Who is there, and how busy: heartbeats, corrected by the halves sent and ended since. Pure: it is told the time.

A heartbeat is up to 250 ms old. Every conductor hears every half that any of them sends, so work on its way counts at
once; otherwise a burst would all go to the worker that looked free when it began.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from halfmoon.lifecycle.listening import ListeningClock
from halfmoon.scheduling.cluster import Cluster, Group, WorkerLoad, grouped
from halfmoon.scheduling.copies import MACHINE
from halfmoon.scheduling.costs.traffic import Traffic
from halfmoon.scheduling.estimates import token_pairs
from halfmoon.scheduling.replication import Pool
from halfmoon.schemas.ids import ModelName, NodeId, RequestId, WorkerId
from halfmoon.schemas.members import (
    MEMBER_LOST_AFTER_S,
    Goodbye,
    Heartbeat,
    MemberState,
    NodeHeartbeat,
    ServiceHeartbeat,
    WorkerHeartbeat,
)
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.splits import DecodeHalf, HalfEnded, PrefillHalf, Role

MAX_MEMBERS = 10_000
_CONDUCTOR = "conductor"
HEARTBEAT_LAG_S = 0.1
"""A heartbeat heard this long after a half was, counts it."""

_PLACE = operator.attrgetter("state", "epoch", "labels", "queued_transfers")
"""Of a pool's heartbeat: what a cluster says of it."""


class _Sent(msgspec.Struct, frozen=True):
    """Work that no heartbeat shows yet."""

    compute_tokens: int
    compute_pairs: float
    context_tokens: int
    """Of a decode half: its prompt."""
    kv_tokens: int
    at_s: float


@dataclass(slots=True)
class _Worker:
    beat: WorkerHeartbeat
    heard_s: float
    """On the members' clock."""
    num_beats: int = 0
    sent: dict[RequestId, _Sent] = field(default_factory=dict)
    ended: set[RequestId] = field(default_factory=set)

    def hear(self, beat: WorkerHeartbeat, now_s: float, heard_s: float) -> None:
        shown = {progress.request_id for progress in beat.requests}
        self.sent = {
            request_id: sent
            for request_id, sent in self.sent.items()
            if request_id not in shown and now_s - sent.at_s < HEARTBEAT_LAG_S
        }
        self.ended.clear()
        self.beat = beat
        self.heard_s = heard_s
        self.num_beats += 1

    def load(self) -> WorkerLoad | None:
        """None where it takes no work."""
        beat, card = self.beat, self.beat.card
        if beat.state is not MemberState.SERVING or card is None:
            return None
        room = max(0, beat.max_requests - beat.num_running)
        compute_tokens = context_tokens = kv_tokens = 0
        compute_pairs = 0.0
        for sent in self.sent.values():
            compute_tokens += sent.compute_tokens
            compute_pairs += sent.compute_pairs
            context_tokens += sent.context_tokens
            kv_tokens += sent.kv_tokens
        return WorkerLoad(
            worker=beat.worker,
            role=beat.role,
            node=beat.node,
            card=card,
            num_requests=max(0, beat.num_running + beat.num_waiting + len(self.sent) - len(self.ended)),
            num_waiting=beat.num_waiting + max(0, len(self.sent) - room),
            max_requests=beat.max_requests,
            queued_tokens=beat.queued_tokens + compute_tokens,
            queued_pairs=beat.queued_pairs + compute_pairs,
            context_tokens=beat.context_tokens + context_tokens,
            free_tokens=max(0, beat.free_tokens - kv_tokens),
            total_tokens=beat.total_tokens,
            prefill_tokens_per_s=beat.prefill_tokens_per_s,
            decode_step_s=beat.decode_step_s,
        )


class Members:
    """The load view of one conductor."""

    def __init__(self) -> None:
        self._clock = ListeningClock()
        """Who was last heard when, is told by it."""
        self._workers: dict[WorkerId, _Worker] = {}
        self._nodes: dict[NodeId, tuple[NodeHeartbeat, float]] = {}
        self._models: dict[ModelName, ModelCard] = {}
        self.traffic = Traffic()
        self._loads: dict[WorkerId, WorkerLoad] = {}
        """Of those that take work, as worked out last."""
        self._groups: tuple[Group, ...] = ()
        """The same by what KV they have, and what they do."""
        self._stale: set[WorkerId] = set()
        """Whose load has changed since."""
        self._cluster: Cluster | None = None
        """As worked out last, until something changes."""
        self._places: Cluster | None = None
        """The same without workers, until something of a node changes."""
        self._conductors: dict[WorkerId, float] = {}
        """When each was last heard."""

    def hear(self, heartbeat: Heartbeat, now_s: float) -> WorkerId | None:
        """Take in a heartbeat. Returns the worker whose life it ends: by a goodbye, or by being a new life's first."""
        heard_s = self._clock.hear(now_s)
        match heartbeat:
            case WorkerHeartbeat():
                return self._hear_worker(heartbeat, now_s, heard_s)
            case NodeHeartbeat():
                known = self._nodes.get(heartbeat.node)
                if (known is None or known[0].epoch <= heartbeat.epoch) and len(self._nodes) < MAX_MEMBERS:
                    if known is None or _PLACE(known[0]) != _PLACE(heartbeat):
                        self._places = self._cluster = None
                    self._nodes[heartbeat.node] = (heartbeat, heard_s)
                    self.traffic.hear(heartbeat.node, heartbeat.receiving, now_s)
                return None
            case ServiceHeartbeat():
                if heartbeat.service == _CONDUCTOR and heartbeat.state is MemberState.SERVING:
                    self._conductors[heartbeat.worker] = heard_s
                else:
                    self._conductors.pop(heartbeat.worker, None)
                return None
            case Goodbye():
                self._conductors.pop(heartbeat.worker, None)
                for node in [node for node, (beat, _) in self._nodes.items() if beat.worker == heartbeat.worker]:
                    self._forget_node(node)
                self._stale.add(heartbeat.worker)
                self._cluster = None
                return heartbeat.worker if self._workers.pop(heartbeat.worker, None) is not None else None
            case _ as unreachable:
                assert_never(unreachable)

    def _forget_node(self, node: NodeId) -> None:
        del self._nodes[node]
        self.traffic.forget(node)
        self._places = self._cluster = None

    def _hear_worker(self, beat: WorkerHeartbeat, now_s: float, heard_s: float) -> WorkerId | None:
        beat = self._known_card(beat)
        self._stale.add(beat.worker)
        self._cluster = None
        if beat.card is not None and beat.state is not MemberState.LOADING:
            self._models[beat.card.name] = beat.card
        known = self._workers.get(beat.worker)
        if known is not None and beat.started_ns < known.beat.started_ns:
            return None
        if known is not None and beat.started_ns == known.beat.started_ns:
            known.hear(beat, now_s, heard_s)
            return None
        if known is not None or len(self._workers) < MAX_MEMBERS:
            self._workers[beat.worker] = _Worker(beat, heard_s, num_beats=1)
        return beat.worker if known is not None else None

    def expire(self) -> list[WorkerId]:
        """Forget those that are overdue; the workers among them."""
        lately_s = self._clock.listened_s - MEMBER_LOST_AFTER_S
        for node in [node for node, (_, at_s) in self._nodes.items() if at_s < lately_s]:
            self._forget_node(node)
        for conductor in [each for each, at_s in self._conductors.items() if at_s < lately_s]:
            del self._conductors[conductor]
        lost = [worker for worker, known in self._workers.items() if known.heard_s < lately_s]
        for worker in lost:
            del self._workers[worker]
            self._stale.add(worker)
            self._cluster = None
        return lost

    def sent_prefill(self, worker: WorkerId, half: PrefillHalf, now_s: float) -> None:
        known = self._workers.get(worker)
        if known is None or known.beat.card is None:
            return
        card, num_tokens = known.beat.card, len(half.tokens)
        reused = min(num_tokens - 1, max(len(half.reuse), half.num_hot) * card.chunk_tokens)
        sent = _Sent(num_tokens - reused, token_pairs(num_tokens, reused), 0, num_tokens, now_s)
        self._sent(known, half.request_id, sent)
        chunk_bytes = card.payload_bytes(card.chunk_tokens)
        pulled: dict[NodeId, int] = {}
        for sources in half.reuse[half.num_hot :]:
            if sources and sources[0].node != known.beat.node:
                pulled[sources[0].node] = pulled.get(sources[0].node, 0) + chunk_bytes
        if pulled:
            self.traffic.asked(known.beat.node, pulled, now_s)

    def sent_decode(self, worker: WorkerId, half: DecodeHalf, now_s: float) -> None:
        known = self._workers.get(worker)
        if known is None or known.beat.card is None:
            return
        num_tokens = len(half.tokens)
        done = num_tokens - 1
        if half.prefill_worker is None:
            done = min(done, half.num_hot * known.beat.card.chunk_tokens)
        kv_tokens = num_tokens + (half.sampling.max_tokens or 0)
        sent = _Sent(num_tokens - done, token_pairs(num_tokens, done), num_tokens, kv_tokens, now_s)
        self._sent(known, half.request_id, sent)

    def _sent(self, known: _Worker, request_id: RequestId, sent: _Sent) -> None:
        if all(progress.request_id != request_id for progress in known.beat.requests):
            known.sent[request_id] = sent
            self._changed(known)

    def refused(self, worker: WorkerId, request_id: RequestId) -> None:
        """It didn't take the half after all."""
        known = self._workers.get(worker)
        if known is not None and known.sent.pop(request_id, None) is not None:
            self._changed(known)

    def half_ended(self, ended: HalfEnded) -> None:
        known = self._workers.get(ended.worker)
        if known is None:
            return
        self._changed(known)
        if known.sent.pop(ended.request_id, None) is not None:
            return
        if any(progress.request_id == ended.request_id for progress in known.beat.requests):
            known.ended.add(ended.request_id)

    def card_of(self, worker: WorkerId) -> ModelCard | None:
        known = self._workers.get(worker)
        return known.beat.card if known is not None else None

    def life_of(self, worker: WorkerId) -> int | None:
        """Start time of the worker's present life; None where it isn't there."""
        known = self._workers.get(worker)
        return known.beat.started_ns if known is not None else None

    def num_beats(self, worker: WorkerId) -> int:
        """Heartbeats heard of this life of the worker; 0 where it isn't there."""
        known = self._workers.get(worker)
        return known.num_beats if known is not None else 0

    def runners(self, request_id: RequestId) -> Iterator[tuple[WorkerId, Role]]:
        """The workers whose last heartbeat names the request."""
        for worker, known in self._workers.items():
            if any(progress.request_id == request_id for progress in known.beat.requests):
                yield worker, known.beat.role

    def conductors(self) -> frozenset[WorkerId]:
        """Those that take requests."""
        return frozenset(self._conductors)

    def pools(self) -> dict[NodeId, Pool]:
        """Those that take chunks, with what they have room for."""
        return {
            node: Pool(
                node=node,
                num_slots=beat.pool.total,
                num_free=beat.pool.free,
                num_ready=beat.pool.ready,
                num_transfers=beat.queued_transfers,
                slot_bytes=beat.slot_bytes or None,
            )
            for node, (beat, _) in self._nodes.items()
            if beat.state is MemberState.SERVING and beat.pool is not None
        }

    def places(self) -> dict[NodeId, dict[str, str]]:
        """Where each pool is: its labels, and its machine."""
        return {node: {**beat.labels, MACHINE: beat.host} for node, (beat, _) in self._nodes.items()}

    def latest_order(self) -> int:
        """The highest number of a standing order that any pool has carried out."""
        return max((beat.orders_seq for beat, _ in self._nodes.values()), default=0)

    def cluster(self) -> Cluster:
        """What was worked out before is used again, as far as nothing has changed: this is asked for each request."""
        if self._cluster is None:
            if self._places is None:
                self._places = self._look_at_nodes()
            self._look_at_workers()
            there = tuple(self._loads.values())
            places = self._places
            self._cluster = Cluster(there, places.nodes, self._models, places.labels, places.transfers, self._groups)
        return self._cluster

    def _look_at_workers(self) -> None:
        """At those whose load has changed; the others keep what was worked out of them, as long as nobody comes, goes
        or becomes another."""
        changed: list[WorkerLoad] = []
        is_same = True
        for worker in sorted(self._stale):
            known, before = self._workers.get(worker), self._loads.get(worker)
            load = known.load() if known is not None else None
            if load is None:
                self._loads.pop(worker, None)
                is_same = is_same and before is None
                continue
            self._loads[worker] = load
            changed.append(load)
            is_same = (
                is_same
                and before is not None
                and load.card is before.card
                and load.role is before.role
                and load.node == before.node
            )
        self._stale.clear()
        self._groups = (
            tuple(group.updated(changed) for group in self._groups) if is_same else grouped(self._loads.values())
        )

    def _look_at_nodes(self) -> Cluster:
        beats = {node: beat for node, (beat, _) in self._nodes.items()}
        return Cluster(
            (),
            {node: beat.epoch for node, beat in beats.items() if beat.state is not MemberState.LOADING},
            {},
            {node: beat.labels for node, beat in beats.items() if beat.labels},
            {node: beat.queued_transfers for node, beat in beats.items() if beat.queued_transfers},
        )

    def _changed(self, known: _Worker) -> None:
        self._stale.add(known.beat.worker)
        self._cluster = None

    def _known_card(self, beat: WorkerHeartbeat) -> WorkerHeartbeat:
        """The heartbeat with the card that is known already, where it is the same: then equal cards are one object."""
        card = self._models.get(beat.card.name) if beat.card is not None else None
        return msgspec.structs.replace(beat, card=card) if card is not None and card == beat.card else beat
