"""Requests go to the cache, and the cache goes to where there is time to compute: Mooncake's KV-centric scheduling
(FAST'25 §4; arXiv 2407.00079v3, Algorithm 1). The default.

For each prefill worker, the estimated time until the prompt's KV is there, and the least of all:

    TTFT = transfer + queue + compute(length, reused prefix)

With the prefix that its own engine and node hold, the transfer is nothing. The longest prefix that the nodes hold
together is taken instead where both are so:

- it is more than `threshold` times as long as the one at hand (`balance`: tuned by how even the queues are). Where
  nothing is at hand, any prefix is;
- pulling what is missing is quicker than computing it: by the measured time of each pair of nodes, with what both move
  already, and the reading where the holder has it on SSD only.

What is pulled, and what is computed, stays on that node, so a prefix spreads as it is asked for: Algorithm 1's last
lines, which copy the best match to the chosen instance. Where the choice falls on a holder although its queue is long,
nothing would spread; then the plan asks for a copy on the idlest node, for those who come next (`Plan.replication`).

Never by longest match alone: that sends all load to one node where every prompt begins alike.

Decode goes where the request would end first; see `decoding`.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from halfmoon.scheduling.cluster import WorkerLoad, Workers
from halfmoon.scheduling.contract import Ask, Candidates, Costs, Plan, PrefillChoice, Replication
from halfmoon.scheduling.policies.balance import IDLE_S, Balance
from halfmoon.scheduling.policies.decoding import Decoding
from halfmoon.scheduling.policies.ranking import best, described, lot
from halfmoon.scheduling.prefix import CachedPrefix
from halfmoon.schemas.model import ModelCard

OVERLOADED = 2.0
"""A holder whose queue is so many times the mean is too busy for the only one."""


class KvCentric:
    """Keeps nothing between decisions but the threshold."""

    def __init__(self, balance: Balance | None = None) -> None:
        self.balance = balance or Balance()

    def rank(self, ask: Ask, candidates: Candidates, costs: Costs, turn: int) -> Plan:
        card, estimates = candidates.card, costs.estimates
        prefilling = _Prefilling(ask, card, costs, self.balance)
        prefills: tuple[PrefillChoice, ...] = ()
        replication: Replication | None = None
        if ask.has_chunks:
            queues_s = np.asarray(estimates.queues_s(candidates.prefills))
            self.balance.observe(queues_s.tolist())
            prefills = prefilling.rank(candidates.prefills, queues_s)
            if prefills:
                replication = prefilling.replication(prefills[0], candidates.prefills, queues_s.tolist())
        decoding = Decoding(ask, card, costs, prefills[0] if prefills else None, prefilling.choose)
        decodes = decoding.rank(candidates.decodes)
        reason = described(ask, prefills, decodes[0])
        return Plan(card, prefills, decodes, reason, replication, prefilling.prefix)


class _Prefilling:
    """Ranks prefill workers for one request."""

    def __init__(self, ask: Ask, card: ModelCard, costs: Costs, balance: Balance) -> None:
        self._ask = ask
        self._card = card
        self._estimates = costs.estimates
        self._num_choices = costs.num_choices
        self._balance = balance
        self._chunk_bytes = card.payload_bytes(card.chunk_tokens)
        self._num_best = len(ask.match)
        self._least_pull_s = costs.estimates.least_pull_s(self._num_best * self._chunk_bytes)
        """Of the whole prefix, between any two nodes."""
        self.prefix = CachedPrefix(ask.match, self._chunk_bytes, costs.estimates, ask.request_id)

    def rank(self, workers: Sequence[WorkerLoad], queues_s: npt.NDArray[np.float64]) -> tuple[PrefillChoice, ...]:
        ask, prefix = self._ask, self.prefix
        alone_s = rest_s = bounds = self._prefills_s(workers, 0)
        if self._num_best or ask.hot:
            rest_s = self._prefills_s(workers, self._num_best)
            num_most = max(self._num_best, max(ask.hot.values(), default=0))
            most_s = self._prefills_s(workers, num_most) if num_most > self._num_best else rest_s
            near = Workers.of(workers).roster.near(prefix.holders, ask.hot)
            bounds = np.minimum(alone_s, self._least_pull_s + most_s)
            bounds[near] = most_s[near]

        def choose(place: int) -> PrefillChoice:
            return self._choose(workers[place], queues_s.item(place), alone_s.item(place), rest_s.item(place))

        return tuple(best(bounds + queues_s, choose, self._key, self._num_choices))

    def _key(self, choice: PrefillChoice) -> tuple[float, ...]:
        worker = choice.worker
        return (choice.cost_s, worker.occupancy, self.prefix.distance(worker.node), lot(self._ask, worker))

    def choose(self, worker: WorkerLoad) -> PrefillChoice:
        """What this worker does best: compute after what it has, or pull."""
        queue_s = self._estimates.queue_s(worker)
        return self._choose(worker, queue_s, self._compute_s(worker, 0), self._compute_s(worker, self._num_best))

    def _choose(self, worker: WorkerLoad, queue_s: float, alone_s: float, rest_s: float) -> PrefillChoice:
        """`alone_s`: to compute the whole prompt; `rest_s`: what follows the longest prefix."""
        prefix, num_best = self.prefix, self._num_best
        held, num_hot = prefix.on(worker.node), self._ask.num_hot(worker.worker)
        num_reused, num_pulled = held.num_leading, 0
        num_there = max(num_reused, num_hot)
        cost_s = held.read_s + (self._compute_s(worker, num_there) if num_there else alone_s)
        least_s = rest_s if num_reused else rest_s + self._least_pull_s
        if least_s < cost_s and self._balance.is_worth_moving(num_best, num_there):
            pull = prefix.pull_to(worker.node)
            if rest_s + pull.total_s < cost_s:
                cost_s, num_reused, num_pulled = rest_s + pull.total_s, num_best, pull.num_chunks
        return PrefillChoice(
            worker=worker, num_reused=num_reused, num_pulled=num_pulled, num_hot=num_hot, cost_s=queue_s + cost_s
        )

    def replication(
        self, first: PrefillChoice, workers: Sequence[WorkerLoad], queues_s: Sequence[float]
    ) -> Replication | None:
        """A copy of the whole prefix on the idlest node without it, where all who could do without pulling are busy."""
        prefix, num_best = self.prefix, self._num_best
        if not num_best or prefix.on(first.worker.node).num_leading < num_best:
            return None
        mean_s = sum(queues_s) / len(queues_s)
        queue_s = self._estimates.queue_s(first.worker)
        if mean_s < IDLE_S or queue_s < OVERLOADED * mean_s:
            return None
        without = [
            (waits_s, worker.node)
            for waits_s, worker in zip(queues_s, workers, strict=True)
            if self._balance.is_worth_moving(num_best, prefix.on(worker.node).num_leading)
        ]
        if not without:
            return None
        idle_s, destination = min(without)
        saved_s = self._compute_s(first.worker, prefix.on(destination).num_leading) - self._compute_s(
            first.worker, num_best
        )
        if idle_s >= queue_s or prefix.pull_to(destination).total_s >= saved_s:
            return None  # There computing it would bring the copy sooner.
        return Replication(source=first.worker.node, destination=destination, num_chunks=num_best)

    def _compute_s(self, worker: WorkerLoad, num_chunks: int) -> float:
        return self._estimates.prefill_s(worker, self._ask.num_tokens, self._tokens(num_chunks))

    def _prefills_s(self, workers: Sequence[WorkerLoad], num_chunks: int) -> npt.NDArray[np.float64]:
        return np.asarray(self._estimates.prefills_s(workers, self._ask.num_tokens, self._tokens(num_chunks)))

    def _tokens(self, num_chunks: int) -> int:
        return min(num_chunks * self._card.chunk_tokens, self._ask.num_tokens)
