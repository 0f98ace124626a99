"""How much longer another node's match has to be before KV moves: the balancing threshold of Mooncake's Algorithm 1
(arXiv 2407.00079v3, `kvcache_balancing_threshold`, which the paper adjusts by hand). Pure.

Where one worker's queue is much longer than the others', prefixes have to come to those that are free: the threshold
falls. Where queues are even, moving KV gains little and takes bandwidth from hand-overs: it rises.

    imbalance = longest queue / mean queue     > aim → threshold × (1 − step)     else → threshold × (1 + step)
"""

from collections.abc import Sequence

FIRST_THRESHOLD = 1.25
MIN_THRESHOLD = 1.0
"""Any longer match may be pulled, if pulling is quicker than computing."""
MAX_THRESHOLD = 4.0
AIM = 1.25
"""Imbalance that is left alone: what a few whole prompts more or less make anyway."""
STEP = 0.01
"""Per decision: a change from one end to the other takes some hundred requests."""
NEWEST_WEIGHT = 0.05
IDLE_S = 0.05
"""Queues shorter than this, on average, say nothing: one prompt more is any imbalance one likes."""


class Balance:
    """The threshold, tuned from decision to decision; or as it is given."""

    def __init__(self, fixed: float | None = None) -> None:
        """`fixed`: the threshold, for good. Raises ValueError where it is below 1."""
        if fixed is not None and fixed < 1:
            raise ValueError(f"the balancing threshold must be at least 1, got {fixed}")
        self.threshold = FIRST_THRESHOLD if fixed is None else fixed
        self.imbalance = 1.0
        """Of the queues seen lately: longest over mean."""
        self._is_fixed = fixed is not None

    def observe(self, queues_s: Sequence[float]) -> None:
        """Take note of all prefill workers' queues, as one decision finds them."""
        mean_s = sum(queues_s) / len(queues_s) if queues_s else 0.0
        if mean_s < IDLE_S:
            return
        self.imbalance += NEWEST_WEIGHT * (max(queues_s) / mean_s - self.imbalance)
        if not self._is_fixed:
            factor = 1 - STEP if self.imbalance > AIM else 1 + STEP
            self.threshold = min(MAX_THRESHOLD, max(MIN_THRESHOLD, self.threshold * factor))

    def is_worth_moving(self, num_best: int, num_there: int) -> bool:
        """Whether a match of `num_best` chunks is so much longer than the `num_there` at hand. Where nothing is, any
        match is: the ratio has no bound."""
        return num_best > num_there and num_best > self.threshold * num_there
