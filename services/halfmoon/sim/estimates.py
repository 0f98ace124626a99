"""What policies are told of times in a simulation: the model's own, so that policies are judged and not their fits."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from halfmoon.engine.sim.timing import Timing
from halfmoon.scheduling.cluster import WorkerLoad
from halfmoon.scheduling.estimates import Estimates
from halfmoon.schemas.ids import NodeId, WorkerId
from halfmoon.sim.clock import Clock
from halfmoon.sim.network import Network


class Queue(Protocol):
    @property
    def backlog_s(self) -> float: ...


class SimEstimates(Estimates):
    def __init__(self, timing: Timing, queues: Mapping[WorkerId, Queue], network: Network, clock: Clock) -> None:
        self._timing = timing
        self._queues = queues
        self._network = network
        self._clock = clock

    def prefill_s(self, worker: WorkerLoad, num_tokens: int, num_reused: int) -> float:
        return self._timing.prefill_s(num_tokens, num_reused)

    def prefills_s(self, workers: Sequence[WorkerLoad], num_tokens: int, num_reused: int) -> list[float]:
        return [self._timing.prefill_s(num_tokens, num_reused)] * len(workers)

    def least_pull_s(self, num_bytes: int) -> float:
        return self._network.through_s(num_bytes)

    def queue_s(self, worker: WorkerLoad) -> float:
        queue = self._queues.get(worker.worker)
        return queue.backlog_s if queue else 0.0

    def pull_s(self, source: NodeId, destination: NodeId, num_bytes: int, *, from_ssd: bool = False) -> float:
        return self._network.estimate_s(source, destination, num_bytes, self._clock.now_s)

    def tbt_s(self, worker: WorkerLoad, batch: int, context_tokens: int) -> float:
        return self._timing.step_s(batch, context_tokens)

    def distance(self, one: NodeId, other: NodeId) -> int:
        return 0 if one == other else 1
