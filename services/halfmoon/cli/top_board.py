"""What `halfmoon top` knows: the last heartbeat of everybody, and the requests that ended lately. Pure."""

from collections import deque
from collections.abc import Iterable
from typing import TypeVar, assert_never

import msgspec

from halfmoon.schemas.ids import NodeId, WorkerId
from halfmoon.schemas.members import (
    MEMBER_LOST_AFTER_S,
    Goodbye,
    Heartbeat,
    NodeHeartbeat,
    ServiceHeartbeat,
    WorkerHeartbeat,
)
from halfmoon.schemas.scheduling import CostModel, Forecast, SchedulingReport
from halfmoon.schemas.splits import HalfEnded, Role

B = TypeVar("B", WorkerHeartbeat, NodeHeartbeat, ServiceHeartbeat)

WINDOW_S = 10.0
"""Of the requests that rates and times are taken over."""
MAX_ENDS = 100_000


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    worker: WorkerId
    role: str
    node: NodeId
    state: str
    model: str
    num_running: int
    num_waiting: int
    max_requests: int
    queued_tokens: int
    free_tokens: int
    total_tokens: int
    context_tokens: int
    age_s: float
    """Since its last heartbeat."""


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    node: NodeId
    state: str
    num_chunks: int
    num_slots: int
    num_free: int
    num_leased: int
    receiving_bytes: int
    labels: dict[str, str]
    age_s: float


class ConductorRow(msgspec.Struct, frozen=True, kw_only=True):
    worker: WorkerId
    state: str
    scheduling: SchedulingReport | None
    age_s: float


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that ended in the last seconds."""

    window_s: float
    requests_per_s: float
    failed_per_s: float
    tokens_per_s: float
    """Completion tokens."""
    hit_ratio: float | None
    """Share of prompt tokens that came from a cache; None where nothing ended."""
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tbt_p50_s: float | None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    workers: tuple[WorkerRow, ...]
    nodes: tuple[NodeRow, ...]
    conductors: tuple[ConductorRow, ...]
    traffic: Traffic
    ttft: Forecast | None
    """Predicted against measured, of all conductors together; so is `tbt`."""
    tbt: Forecast | None
    models: tuple[CostModel, ...]
    """As the conductor that has seen most tells of them: all fit to the same measurements."""


class Board:
    """Hears, and gives snapshots."""

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._workers: dict[WorkerId, tuple[WorkerHeartbeat, float]] = {}
        self._nodes: dict[NodeId, tuple[NodeHeartbeat, float]] = {}
        self._conductors: dict[WorkerId, tuple[ServiceHeartbeat, float]] = {}
        self._ends: deque[tuple[float, HalfEnded]] = deque(maxlen=MAX_ENDS)

    def hear(self, beat: Heartbeat, now_s: float) -> None:
        match beat:
            case WorkerHeartbeat():
                self._workers[beat.worker] = (beat, now_s)
            case NodeHeartbeat():
                self._nodes[beat.node] = (beat, now_s)
            case ServiceHeartbeat():
                if beat.service == "conductor":
                    self._conductors[beat.worker] = (beat, now_s)
            case Goodbye():
                self._workers.pop(beat.worker, None)
                self._conductors.pop(beat.worker, None)
                self._nodes = {node: known for node, known in self._nodes.items() if known[0].worker != beat.worker}
            case _ as unreachable:
                assert_never(unreachable)

    def ended(self, ended: HalfEnded, now_s: float) -> None:
        if ended.role is not Role.PREFILL:
            self._ends.append((now_s, ended))

    def snapshot(self, now_s: float) -> Snapshot:
        """Without those that are overdue."""
        conductors = tuple(
            ConductorRow(worker=beat.worker, state=beat.state.value, scheduling=beat.scheduling, age_s=now_s - at_s)
            for beat, at_s in self._there(self._conductors.values(), now_s)
        )
        reports = [row.scheduling for row in conductors if row.scheduling is not None]
        return Snapshot(
            workers=tuple(_worker(beat, now_s - at_s) for beat, at_s in self._there(self._workers.values(), now_s)),
            nodes=tuple(_node(beat, now_s - at_s) for beat, at_s in self._there(self._nodes.values(), now_s)),
            conductors=conductors,
            traffic=self._traffic(now_s),
            ttft=_together([report.ttft for report in reports]),
            tbt=_together([report.tbt for report in reports]),
            models=max((report.models for report in reports), key=_num_samples, default=()),
        )

    @staticmethod
    def _there(known: Iterable[tuple[B, float]], now_s: float) -> list[tuple[B, float]]:
        there = [(beat, at_s) for beat, at_s in known if now_s - at_s <= MEMBER_LOST_AFTER_S]
        return sorted(there, key=lambda each: each[0].worker)

    def _traffic(self, now_s: float) -> Traffic:
        while self._ends and now_s - self._ends[0][0] > WINDOW_S:
            self._ends.popleft()
        window_s = max(1e-3, min(WINDOW_S, now_s - self._since_s))
        ends = [ended for _, ended in self._ends]
        usages = [ended.usage for ended in ends if ended.usage is not None]
        prompt_tokens = sum(usage.prompt_tokens for usage in usages)
        ttfts_s = sorted(ended.ttft_s for ended in ends if ended.ttft_s is not None)
        tbts_s = sorted(ended.tbt_s for ended in ends if ended.tbt_s is not None)
        return Traffic(
            window_s=window_s,
            requests_per_s=len(ends) / window_s,
            failed_per_s=sum(ended.error is not None for ended in ends) / window_s,
            tokens_per_s=sum(ended.num_generated_tokens for ended in ends) / window_s,
            hit_ratio=sum(usage.cached_tokens for usage in usages) / prompt_tokens if prompt_tokens else None,
            ttft_p50_s=_quantile(ttfts_s, 0.5),
            ttft_p99_s=_quantile(ttfts_s, 0.99),
            tbt_p50_s=_quantile(tbts_s, 0.5),
        )


def _worker(beat: WorkerHeartbeat, age_s: float) -> WorkerRow:
    return WorkerRow(
        worker=beat.worker,
        role=beat.role.value,
        node=beat.node,
        state=beat.state.value,
        model="" if beat.card is None else beat.card.name,
        num_running=beat.num_running,
        num_waiting=beat.num_waiting,
        max_requests=beat.max_requests,
        queued_tokens=beat.queued_tokens,
        free_tokens=beat.free_tokens,
        total_tokens=beat.total_tokens,
        context_tokens=beat.context_tokens,
        age_s=age_s,
    )


def _node(beat: NodeHeartbeat, age_s: float) -> NodeRow:
    pool = beat.pool
    return NodeRow(
        node=beat.node,
        state=beat.state.value,
        num_chunks=0 if pool is None else pool.num_chunks,
        num_slots=0 if pool is None else pool.total,
        num_free=0 if pool is None else pool.free,
        num_leased=0 if pool is None else pool.leased,
        receiving_bytes=sum(beat.receiving.values()),
        labels=beat.labels,
        age_s=age_s,
    )


def _together(forecasts: Iterable[Forecast | None]) -> Forecast | None:
    """One of several conductors', each weighed by its requests."""
    there = [forecast for forecast in forecasts if forecast is not None]
    total = sum(forecast.num_requests for forecast in there)
    if not total:
        return None
    return Forecast(
        num_requests=total,
        predicted_s=sum(each.num_requests * each.predicted_s for each in there) / total,
        measured_s=sum(each.num_requests * each.measured_s for each in there) / total,
        error=sum(each.num_requests * each.error for each in there) / total,
    )


def _num_samples(models: tuple[CostModel, ...]) -> int:
    return sum(model.num_samples for model in models)


def _quantile(ordered: list[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
