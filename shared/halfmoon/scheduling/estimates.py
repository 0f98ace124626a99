"""How long things take: what policies ask, and the answers where nobody has measured."""

from dataclasses import dataclass
from typing import Protocol

from halfmoon.scheduling.cluster import WorkerLoad
from halfmoon.schemas.ids import NodeId


def token_pairs(num_tokens: int, num_reused: int) -> float:
    """Pairs of a new token and one that it attends to, in a prompt whose first `num_reused` tokens have their KV: the
    part of prefill that grows with the square of the length."""
    num_new = num_tokens - num_reused
    return num_new * (num_reused + num_new / 2)


class Estimates(Protocol):
    """Fitted from what the workers measured (`costs/`), or a profile's numbers in a simulation."""

    def prefill_s(self, worker: WorkerLoad, num_tokens: int, num_reused: int) -> float:
        """Seconds to compute a prompt of `num_tokens`, the KV of its first `num_reused` tokens being there."""

    def least_prefill_s(self, num_tokens: int, num_reused: int) -> float:
        """What no worker computes such a prompt sooner than; 0 where that isn't known. It spares looking at those whose
        queue alone is longer than another's queue and computation."""

    def queue_s(self, worker: WorkerLoad) -> float:
        """Seconds until this worker would begin with another prompt."""

    def pull_s(self, source: NodeId, destination: NodeId, num_bytes: int, *, from_ssd: bool = False) -> float:
        """Seconds to move so much KV between two nodes' pools, given what both are moving already. On one node, 0 but
        for what has to be read from its SSD."""

    def tbt_s(self, worker: WorkerLoad, batch: int, context_tokens: int) -> float:
        """Seconds between two tokens of one request, in a batch of so many with so many tokens of context in sum."""

    def distance(self, one: NodeId, other: NodeId) -> int:
        """How far apart two nodes are: 0 for a node and itself, then more from level to level. See `topology.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """Constants: a worker's own word on its speed where it gives one, else the same for all."""

    prefill_tokens_per_s: float = 2_000.0
    pull_bytes_per_s: float = 1e9
    ssd_bytes_per_s: float = 1e9
    decode_step_s: float = 0.03
    batch_share: float = 0.05
    """By how much of a step one more request in the batch lengthens it."""

    def prefill_s(self, worker: WorkerLoad, num_tokens: int, num_reused: int) -> float:
        return (num_tokens - num_reused) / (worker.prefill_tokens_per_s or self.prefill_tokens_per_s)

    def least_prefill_s(self, num_tokens: int, num_reused: int) -> float:
        return 0.0  # A worker's own word may be any.

    def queue_s(self, worker: WorkerLoad) -> float:
        return worker.queued_tokens / (worker.prefill_tokens_per_s or self.prefill_tokens_per_s)

    def pull_s(self, source: NodeId, destination: NodeId, num_bytes: int, *, from_ssd: bool = False) -> float:
        read_s = num_bytes / self.ssd_bytes_per_s if from_ssd else 0.0
        return read_s if source == destination else read_s + num_bytes / self.pull_bytes_per_s

    def tbt_s(self, worker: WorkerLoad, batch: int, context_tokens: int) -> float:
        return (worker.decode_step_s or self.decode_step_s) * (1 + self.batch_share * max(0, batch - 1))

    def distance(self, one: NodeId, other: NodeId) -> int:
        return 0 if one == other else 1
