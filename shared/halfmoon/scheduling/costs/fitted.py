"""The estimates of a live system: three kinds of models, fitted to what workers and pools measure. Pure.

    prefill   seconds = a + b · new tokens + c · token pairs            by worker, else by model and role
    TBT       seconds = a + b · batch + c · tokens of context           by worker, else by model and role
    pull      seconds = latency + bytes / bandwidth                     by pair, else by class of link, else over all

Where nobody has measured, the assumptions of the settings hold (`Assumed`), and a worker's own word on its speed.
`Regression` says how a line is fitted; a worker's or pair's own begins where that of its like stands.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from halfmoon.scheduling.cluster import WorkerLoad, Workers
from halfmoon.scheduling.costs.ladder import Ladder
from halfmoon.scheduling.costs.regression import Regression
from halfmoon.scheduling.costs.traffic import Traffic
from halfmoon.scheduling.costs.workers import Key, WorkerModels
from halfmoon.scheduling.estimates import Assumed, Column, Estimates, token_pairs
from halfmoon.scheduling.topology import distance, link_class
from halfmoon.schemas.ids import NodeId, WorkerId
from halfmoon.schemas.measurements import DecodeSample, PrefillSample, PullSample
from halfmoon.schemas.members import NodeHeartbeat, WorkerHeartbeat

FIRST_OVERHEAD_S = 0.005
"""Of a prompt, whatever its length: what is assumed before it is measured."""
FIRST_LATENCY_S = 0.002
QUADRATIC_AT_TOKENS = 8_192
"""Length at which attention may well cost a quarter of all else: how much freedom the quadratic term has at first."""
_ALL = "all links"
_REFRESH_EVERY = 256
_LONG = 64
"""Characters of a fingerprint, which is shown by its first few."""


@dataclass(frozen=True, slots=True)
class Fit:
    """One model, as metrics and `halfmoon top` show it."""

    kind: str
    """`prefill`, `tbt` or `pull`."""
    subject: str
    """A worker; a model and role; a pair of nodes, a class of links."""
    coefficients: tuple[float, ...]
    num_samples: int
    error: float


class Fitted(Estimates):
    """Told of heartbeats; asked by policies."""

    def __init__(self, assumed: Assumed, traffic: Traffic) -> None:
        self._assumed = assumed
        self._traffic = traffic
        self._prefill = WorkerModels(self._first_prefill)
        self._tbt = WorkerModels(self._first_tbt)
        self._pull: Ladder[Key] = Ladder(lambda _: self._first_pull(assumed.pull_bytes_per_s))
        self._ssd: Ladder[Key] = Ladder(lambda _: self._first_pull(assumed.ssd_bytes_per_s))
        self._labels: dict[NodeId, Mapping[str, str]] = {}
        self._pull_of: dict[tuple[NodeId, NodeId], Regression | None] = {}
        """As found last, until a model or a label comes or goes."""
        self._least_pull = (math.inf, math.inf)
        """What no model of a pull says less than, or said less since it was looked for."""
        self._num_pulled = 0

    # What was measured

    def hear_node(self, beat: NodeHeartbeat) -> None:
        self.place(beat.node, beat.labels)
        for pull in beat.pulls:
            self.pulled(beat.node, pull)

    def hear_worker(self, beat: WorkerHeartbeat) -> None:
        if beat.card is None or not (beat.prefills or beat.decodes):
            return
        like = (beat.card.name, beat.card.fingerprint, beat.role.value)
        for prefill in beat.prefills:
            self.prefilled(beat.worker, like, prefill)
        for decode in beat.decodes:
            self.decoded(beat.worker, like, decode)

    def prefilled(self, worker: WorkerId, like: Key, sample: PrefillSample) -> None:
        num_new = sample.num_tokens - sample.num_reused
        features = (1.0, float(num_new), token_pairs(sample.num_tokens, sample.num_reused))
        self._prefill.observe(worker, like, features, sample.duration_s)

    def decoded(self, worker: WorkerId, like: Key, sample: DecodeSample) -> None:
        features = (1.0, float(sample.batch), float(sample.context_tokens))
        self._tbt.observe(worker, like, features, sample.step_s)

    def pulled(self, destination: NodeId, sample: PullSample) -> None:
        """What was under way besides shared the link: with it, the time tells the link's bandwidth."""
        source = sample.source
        features = (1.0, float(sample.num_bytes + sample.num_bytes_ahead))
        if source == destination:
            self._ssd.observe(((source,), (_ALL,)), features, sample.duration_s)
        else:
            pair = (source, destination)
            keys = (pair, (self._class(*pair),), (_ALL,))
            if self._pull.observe(keys, features, sample.duration_s):
                self._pull_of.clear()
            self._bound_pulls([self._pull.find(key) for key in keys])

    def place(self, node: NodeId, labels: Mapping[str, str]) -> None:
        """Where a node is."""
        if labels != self._labels.get(node, {}):
            self._labels[node] = dict(labels)
            self._pull_of.clear()

    def forget(self, worker: WorkerId) -> None:
        """It is gone: under its name another one may come, on other hardware."""
        self._prefill.forget(worker)
        self._tbt.forget(worker)

    # What policies ask

    def prefill_s(self, worker: WorkerLoad, num_tokens: int, num_reused: int) -> float:
        model = self._prefill.of(worker)
        if model is None:
            return self._assumed.prefill_s(worker, num_tokens, num_reused)
        num_new = num_tokens - num_reused
        return model[0] + num_new * (model[1] + model[2] * (num_reused + num_new / 2))

    def prefills_s(self, workers: Sequence[WorkerLoad], num_tokens: int, num_reused: int) -> Column:
        models = self._prefill.columns(Workers.of(workers))
        if models is None:
            return super().prefills_s(workers, num_tokens, num_reused)
        features = np.array((1.0, num_tokens - num_reused, token_pairs(num_tokens, num_reused)))
        prefills_s: Column = features.dot(models)
        return prefills_s

    def queues_s(self, workers: Sequence[WorkerLoad]) -> Column:
        workers = Workers.of(workers)
        models = self._prefill.columns(workers)
        if models is None:
            return super().queues_s(workers)
        queues_s = np.add.reduce(workers.queued * models)
        return np.where(workers.table.queued_tokens, queues_s, 0.0)

    def next_tbts_s(self, workers: Sequence[WorkerLoad], num_tokens: int) -> Column:
        workers = Workers.of(workers)
        models = self._tbt.columns(workers)
        if models is None:
            return super().next_tbts_s(workers, num_tokens)
        _, per_request, per_token = models
        load = workers.table
        with_it_s = np.array((1.0, 1.0, num_tokens)).dot(models)
        tbts_s: Column = with_it_s + load.num_requests * per_request + load.context_tokens * per_token
        return tbts_s

    def least_pull_s(self, num_bytes: int) -> float:
        latency_s, per_byte_s = self._least_pull
        if math.isinf(latency_s):
            latency_s, per_byte_s = 0.0, 1 / self._assumed.pull_bytes_per_s
        return latency_s + num_bytes * per_byte_s if num_bytes > 0 else 0.0

    def queue_s(self, worker: WorkerLoad) -> float:
        model = self._prefill.of(worker)
        if model is None:
            return self._assumed.queue_s(worker)
        if not worker.queued_tokens:
            return 0.0
        return worker.num_requests * model[0] + worker.queued_tokens * model[1] + worker.queued_pairs * model[2]

    def pull_s(self, source: NodeId, destination: NodeId, num_bytes: int, *, from_ssd: bool = False) -> float:
        read_s = self._read_s(source, num_bytes) if from_ssd else 0.0
        if source == destination or num_bytes <= 0:
            return read_s
        latency_s, per_byte_s = self._pull_model(source, destination)
        return read_s + latency_s + (num_bytes + self._traffic.ahead(source, destination)) * per_byte_s

    def tbt_s(self, worker: WorkerLoad, batch: int, context_tokens: int) -> float:
        model = self._tbt.of(worker)
        if model is None:
            return self._assumed.tbt_s(worker, batch, context_tokens)
        return model[0] + model[1] * batch + model[2] * context_tokens

    def distance(self, one: NodeId, other: NodeId) -> int:
        return distance(self._labels, one, other)

    def fits(self) -> Iterator[Fit]:
        """Every model that has learned something."""
        kinds = (
            ("prefill", self._prefill.ladder),
            ("tbt", self._tbt.ladder),
            ("pull", self._pull),
            ("ssd", self._ssd),
        )
        for kind, ladder in kinds:
            for key, model in ladder.items():
                subject = ("→" if kind == "pull" else " ").join(part if len(part) < _LONG else part[:8] for part in key)
                yield Fit(kind, subject, model.coefficients, model.num_samples, model.error)

    def _pull_model(self, source: NodeId, destination: NodeId) -> tuple[float, ...]:
        pair = (source, destination)
        try:
            model = self._pull_of[pair]
        except KeyError:
            model = self._pull_of[pair] = self._pull.find(pair, (self._class(*pair),), (_ALL,))
        return (0.0, 1 / self._assumed.pull_bytes_per_s) if model is None else model.coefficients

    def _bound_pulls(self, changed: Sequence[Regression | None]) -> None:
        """A bound may be below what it bounds, and cheaply so: all models are looked at but once in a while."""
        self._num_pulled += 1
        if self._num_pulled % _REFRESH_EVERY == 0:
            self._least_pull = (math.inf, math.inf)
            changed = [model for _, model in self._pull.items()]
        least = [self._least_pull, *(model.coefficients for model in changed if model is not None)]
        self._least_pull = (min(each[0] for each in least), min(each[1] for each in least))

    def _read_s(self, node: NodeId, num_bytes: int) -> float:
        found = self._ssd.find((node,), (_ALL,))
        return num_bytes / self._assumed.ssd_bytes_per_s if found is None else found.predict((1.0, float(num_bytes)))

    def _class(self, source: NodeId, destination: NodeId) -> str:
        return link_class(self._labels, source, destination)

    def _first_prefill(self, key: Key) -> Regression:
        per_token_s = 1 / self._assumed.prefill_tokens_per_s
        return Regression(
            (FIRST_OVERHEAD_S, per_token_s, 0.0),
            (4 * FIRST_OVERHEAD_S, per_token_s, 0.5 * per_token_s / QUADRATIC_AT_TOKENS),
        )

    def _first_tbt(self, key: Key) -> Regression:
        step_s, share = self._assumed.decode_step_s, self._assumed.batch_share
        per_token_s = step_s / 100_000
        return Regression((step_s * (1 - share), step_s * share, 0.0), (step_s, step_s * share, per_token_s))

    @staticmethod
    def _first_pull(bytes_per_s: float) -> Regression:
        return Regression((FIRST_LATENCY_S, 1 / bytes_per_s), (2 * FIRST_LATENCY_S, 1 / bytes_per_s))
