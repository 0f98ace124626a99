"""How long things take: what policies ask, and the answers where nobody has measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from halfmoon.scheduling.cluster import WorkerLoad
from halfmoon.schemas.ids import NodeId

Column = Sequence[float] | npt.NDArray[np.float64]
"""One number for each worker, in their order."""


def token_pairs(num_tokens: int, num_reused: int) -> float:
    """Pairs of a new token and one that it attends to, in a prompt whose first `num_reused` tokens have their KV: the
    part of prefill that grows with the square of the length."""
    num_new = num_tokens - num_reused
    return num_new * (num_reused + num_new / 2)


class Estimates(Protocol):
    """Fitted from what the workers measured (`costs/`), or a profile's numbers in a simulation.

    A decision looks at every worker, so there is each question about all of them at once, too. The answers are those
    of the single question, only sooner.
    """

    def prefill_s(self, worker: WorkerLoad, num_tokens: int, num_reused: int) -> float:
        """Seconds to compute a prompt of `num_tokens`, the KV of its first `num_reused` tokens being there."""

    def queue_s(self, worker: WorkerLoad) -> float:
        """Seconds until this worker would begin with another prompt."""

    def pull_s(self, source: NodeId, destination: NodeId, num_bytes: int, *, from_ssd: bool = False) -> float:
        """Seconds to move so much KV between two nodes' pools, given what both are moving already. On one node, 0 but
        for what has to be read from its SSD."""

    def tbt_s(self, worker: WorkerLoad, batch: int, context_tokens: int) -> float:
        """Seconds between two tokens of one request, in a batch of so many with so many tokens of context in sum."""

    def distance(self, one: NodeId, other: NodeId) -> int:
        """How far apart two nodes are: 0 for a node and itself, then more from level to level. See `topology.py`."""

    def least_pull_s(self, num_bytes: int) -> float:
        """What no pull of so much between two nodes is quicker than; 0 where that isn't known."""
        return 0.0

    def prefills_s(self, workers: Sequence[WorkerLoad], num_tokens: int, num_reused: int) -> Column:
        return [self.prefill_s(worker, num_tokens, num_reused) for worker in workers]

    def queues_s(self, workers: Sequence[WorkerLoad]) -> Column:
        return [self.queue_s(worker) for worker in workers]

    def next_tbts_s(self, workers: Sequence[WorkerLoad], num_tokens: int) -> Column:
        """TBT of each worker with one more request, of so many tokens."""
        return [self.tbt_s(worker, worker.num_requests + 1, worker.context_tokens + num_tokens) for worker in workers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed(Estimates):
    """Constants: a worker's own word on its speed where it gives one, else the same for all."""

    prefill_tokens_per_s: float = 2_000.0
    pull_bytes_per_s: float = 1e9
    ssd_bytes_per_s: float = 1e9
    decode_step_s: float = 0.03
    batch_share: float = 0.05
    """By how much of a step one more request in the batch lengthens it."""

    def prefill_s(self, worker: WorkerLoad, num_tokens: int, num_reused: int) -> float:
        return (num_tokens - num_reused) / (worker.prefill_tokens_per_s or self.prefill_tokens_per_s)

    def queue_s(self, worker: WorkerLoad) -> float:
        return worker.queued_tokens / (worker.prefill_tokens_per_s or self.prefill_tokens_per_s)

    def pull_s(self, source: NodeId, destination: NodeId, num_bytes: int, *, from_ssd: bool = False) -> float:
        read_s = num_bytes / self.ssd_bytes_per_s if from_ssd else 0.0
        return read_s if source == destination else read_s + num_bytes / self.pull_bytes_per_s

    def tbt_s(self, worker: WorkerLoad, batch: int, context_tokens: int) -> float:
        return (worker.decode_step_s or self.decode_step_s) * (1 + self.batch_share * max(0, batch - 1))

    def least_pull_s(self, num_bytes: int) -> float:
        return num_bytes / self.pull_bytes_per_s

    def distance(self, one: NodeId, other: NodeId) -> int:
        return 0 if one == other else 1
