"""The estimates of a live system: three kinds of models, fitted to what workers and pools measure. Pure.

    prefill   seconds = a + b · new tokens + c · token pairs            by worker, else by model and role
    TBT       seconds = a + b · batch + c · tokens of context           by worker, else by model and role
    pull      seconds = latency + bytes / bandwidth                     by pair, else by class of link, else over all

Where nobody has measured, the assumptions of the settings hold (`Assumed`), and a worker's own word on its speed.
`Regression` says how a line is fitted; a worker's or pair's own begins where that of its like stands.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfmoon.scheduling.cluster import WorkerLoad
from halfmoon.scheduling.costs.ladder import Ladder
from halfmoon.scheduling.costs.regression import Regression
from halfmoon.scheduling.costs.traffic import Traffic
from halfmoon.scheduling.estimates import Assumed, Estimates, token_pairs
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
_LONG = 64
"""Characters of a fingerprint, which is shown by its first few."""

Key = tuple[str, ...]


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
        self._prefill: Ladder[Key] = Ladder(self._first_prefill)
        self._tbt: Ladder[Key] = Ladder(self._first_tbt)
        self._pull: Ladder[Key] = Ladder(lambda _: self._first_pull(assumed.pull_bytes_per_s))
        self._ssd: Ladder[Key] = Ladder(lambda _: self._first_pull(assumed.ssd_bytes_per_s))
        self._labels: dict[NodeId, Mapping[str, str]] = {}
        self._prefill_of: dict[WorkerId, tuple[float, ...] | None] = {}
        self._tbt_of: dict[WorkerId, tuple[float, ...] | None] = {}
        self._pull_of: dict[tuple[NodeId, NodeId], tuple[float, ...]] = {}
        self._least_pull: tuple[float, float] | None = None
        self._asked: tuple[Sequence[WorkerLoad], list[Any]] = ((), [])
        """What has been looked up, until a model changes."""

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
        self._prefill.observe(((worker,), like), features, sample.duration_s)
        self._prefill_of.clear()
        self._asked = ((), [])

    def decoded(self, worker: WorkerId, like: Key, sample: DecodeSample) -> None:
        features = (1.0, float(sample.batch), float(sample.context_tokens))
        self._tbt.observe(((worker,), like), features, sample.step_s)
        self._tbt_of.clear()

    def pulled(self, destination: NodeId, sample: PullSample) -> None:
        """What was under way besides shared the link: with it, the time tells the link's bandwidth."""
        source = sample.source
        features = (1.0, float(sample.num_bytes + sample.num_bytes_ahead))
        if source == destination:
            self._ssd.observe(((source,), (_ALL,)), features, sample.duration_s)
        else:
            pair = (source, destination)
            self._pull.observe((pair, (self._class(*pair),), (_ALL,)), features, sample.duration_s)
            self._pull_of.clear()
            self._least_pull = None

    def place(self, node: NodeId, labels: Mapping[str, str]) -> None:
        """Where a node is."""
        if labels != self._labels.get(node, {}):
            self._labels[node] = dict(labels)
            self._pull_of.clear()

    def forget(self, worker: WorkerId) -> None:
        """It is gone: under its name another one may come, on other hardware."""
        self._prefill.forget((worker,))
        self._tbt.forget((worker,))
        self._prefill_of.pop(worker, None)
        self._asked = ((), [])
        self._tbt_of.pop(worker, None)

    # What policies ask

    def prefill_s(self, worker: WorkerLoad, num_tokens: int, num_reused: int) -> float:
        model = self._prefill_model(worker)
        if model is None:
            return self._assumed.prefill_s(worker, num_tokens, num_reused)
        num_new = num_tokens - num_reused
        return model[0] + num_new * (model[1] + model[2] * (num_reused + num_new / 2))

    def prefills_s(self, workers: Sequence[WorkerLoad], num_tokens: int, num_reused: int) -> list[float]:
        models = self._prefill_models(workers)
        if None in models:
            return super().prefills_s(workers, num_tokens, num_reused)
        num_new = num_tokens - num_reused
        pairs = token_pairs(num_tokens, num_reused)
        return [a + num_new * b + pairs * c for a, b, c in models]

    def queues_s(self, workers: Sequence[WorkerLoad]) -> list[float]:
        models = self._prefill_models(workers)
        if None in models:
            return super().queues_s(workers)
        return [
            worker.num_requests * a + worker.queued_tokens * b + worker.queued_pairs * c
            if worker.queued_tokens
            else 0.0
            for worker, (a, b, c) in zip(workers, models, strict=True)
        ]

    def next_tbts_s(self, workers: Sequence[WorkerLoad], num_tokens: int) -> list[float]:
        known = self._tbt_of
        try:
            models: list[Any] = [known[worker.worker] for worker in workers]
        except KeyError:
            return super().next_tbts_s(workers, num_tokens)
        if None in models:
            return super().next_tbts_s(workers, num_tokens)
        return [
            a + (worker.num_requests + 1) * b + (worker.context_tokens + num_tokens) * c
            for worker, (a, b, c) in zip(workers, models, strict=True)
        ]

    def least_pull_s(self, num_bytes: int) -> float:
        if self._least_pull is None:
            models = [model.coefficients for _, model in self._pull.items()] or [
                (0.0, 1 / self._assumed.pull_bytes_per_s)
            ]
            self._least_pull = (min(model[0] for model in models), min(model[1] for model in models))
        return self._least_pull[0] + num_bytes * self._least_pull[1] if num_bytes > 0 else 0.0

    def _prefill_models(self, workers: Sequence[WorkerLoad]) -> list[Any]:
        """Of one decision's workers, asked for several times."""
        if workers is not self._asked[0]:
            known = self._prefill_of
            try:
                models = [known[worker.worker] for worker in workers]
            except KeyError:
                models = [self._prefill_model(worker) for worker in workers]
            self._asked = (workers, models)
        return self._asked[1]

    def queue_s(self, worker: WorkerLoad) -> float:
        model = self._prefill_model(worker)
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
        try:
            model = self._tbt_of[worker.worker]
        except KeyError:
            found = self._tbt.find((worker.worker,), _like(worker))
            model = self._tbt_of[worker.worker] = None if found is None else found.coefficients
        if model is None:
            return self._assumed.tbt_s(worker, batch, context_tokens)
        return model[0] + model[1] * batch + model[2] * context_tokens

    def distance(self, one: NodeId, other: NodeId) -> int:
        return distance(self._labels, one, other)

    def fits(self) -> Iterator[Fit]:
        """Every model that has learned something."""
        kinds = (("prefill", self._prefill), ("tbt", self._tbt), ("pull", self._pull), ("ssd", self._ssd))
        for kind, ladder in kinds:
            for key, model in ladder.items():
                subject = ("→" if kind == "pull" else " ").join(part if len(part) < _LONG else part[:8] for part in key)
                yield Fit(kind, subject, model.coefficients, model.num_samples, model.error)

    def _prefill_model(self, worker: WorkerLoad) -> tuple[float, ...] | None:
        try:
            return self._prefill_of[worker.worker]
        except KeyError:
            found = self._prefill.find((worker.worker,), _like(worker))
            model = self._prefill_of[worker.worker] = None if found is None else found.coefficients
            return model

    def _pull_model(self, source: NodeId, destination: NodeId) -> tuple[float, ...]:
        pair = (source, destination)
        model = self._pull_of.get(pair)
        if model is None:
            found = self._pull.find(pair, (self._class(*pair),), (_ALL,))
            model = found.coefficients if found else (0.0, 1 / self._assumed.pull_bytes_per_s)
            self._pull_of[pair] = model
        return model

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


def _like(worker: WorkerLoad) -> Key:
    return (worker.card.name, worker.card.fingerprint, worker.role.value)
