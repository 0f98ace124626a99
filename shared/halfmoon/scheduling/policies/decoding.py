"""Which decode worker: the one where the request would end first. Pure; used by the policies that estimate.

For each worker, the estimated seconds until the end of the request (Mooncake, FAST'25 §4, picks by predicted TBT alone;
here it is weighed against what else differs):

    until its KV is there: handed over, or computed there
    + until there is room, where the engine's KV is full
    + tokens to come × predicted TBT in the batch that it would join

A full batch and a full KV cache count a little more than TBT says: whoever comes next finds them so.

One that has all whole chunks hot may do without prefill, if it begins at once: what is hot now may be gone by the time
that others have ended.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from halfmoon.scheduling.cluster import Roster, WorkerLoad, Workers
from halfmoon.scheduling.contract import Ask, Costs, DecodeChoice, PrefillChoice
from halfmoon.scheduling.policies.ranking import best, lot
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.splits import Role

FULL_BATCH_COST_S = 0.5
"""What a decode worker at its limit costs, against an idle one: a whole batch slows each step by about this, in sum."""
NO_ROOM_COST_S = 10.0
"""A request that finds no KV has to wait for another one's end."""
TYPICAL_COMPLETION_TOKENS = 128
"""Completions that may be longer are taken to be about so long: few use up what they may."""

Here = Callable[[WorkerLoad], PrefillChoice]
"""What a colocated worker would do for the prompt itself."""


class Decoding:
    """Ranks decode workers for one request, once it is known who provides the KV."""

    def __init__(self, ask: Ask, card: ModelCard, costs: Costs, prefill: PrefillChoice | None, here: Here) -> None:
        self._ask = ask
        self._card = card
        self._estimates = costs.estimates
        self._num_choices = costs.num_choices
        self._prefill = prefill
        self._here = here
        self._num_coming = min(TYPICAL_COMPLETION_TOKENS, ask.max_tokens or TYPICAL_COMPLETION_TOKENS)

    def rank(self, workers: Sequence[WorkerLoad]) -> tuple[DecodeChoice, ...]:
        workers = Workers.of(workers)
        tbts_s = np.asarray(self._estimates.next_tbts_s(workers, self._ask.num_tokens))
        bounds = self._num_coming * tbts_s + FULL_BATCH_COST_S * workers.table.fullness
        if self._prefill is not None:
            bounds = self._with_waits(bounds, workers.roster, self._prefill)

        def choose(place: int) -> DecodeChoice:
            return self._choose(workers[place], tbts_s.item(place))

        return tuple(best(bounds, choose, self._key, self._num_choices))

    def _with_waits(
        self, bounds: npt.NDArray[np.float64], roster: Roster, prefill: PrefillChoice
    ) -> npt.NDArray[np.float64]:
        """And the seconds until the prompt's KV is in each worker's engine, at least. All wait for the same prefill,
        but those that have everything hot, or prefill for themselves."""
        num_bytes = self._ask.num_tokens * self._card.kv_bytes_per_token
        with_waits = bounds + (prefill.cost_s + self._estimates.least_pull_s(num_bytes))
        if beside := roster.on.get(prefill.worker.node):
            with_waits[beside] = bounds[beside] + prefill.cost_s
        if waiting_for_none := roster.colocated + roster.near((), self._ask.hot):
            with_waits[waiting_for_none] = bounds[waiting_for_none]
        return with_waits

    def _key(self, choice: DecodeChoice) -> tuple[float, ...]:
        prefill, worker = self._prefill, choice.worker
        far = 0 if prefill is None else self._estimates.distance(prefill.worker.node, worker.node)
        return (choice.cost_s, far, lot(self._ask, worker))

    def _choose(self, worker: WorkerLoad, tbt_s: float) -> DecodeChoice:
        ask = self._ask
        needed = _needed_tokens(ask, worker)
        has_room = not worker.total_tokens or needed <= worker.free_tokens
        room_s = 0.0 if has_room else NO_ROOM_COST_S * needed / worker.total_tokens
        kv_s, is_alone = self._kv_s(worker, may_begin=has_room and not worker.num_waiting)
        return DecodeChoice(
            worker=worker,
            cost_s=kv_s + room_s + self._num_coming * tbt_s + FULL_BATCH_COST_S * worker.fullness,
            ttft_s=kv_s + room_s + tbt_s,
            tbt_s=tbt_s,
            num_hot=ask.num_hot(worker.worker),
            is_alone=is_alone,
        )

    def _kv_s(self, worker: WorkerLoad, *, may_begin: bool) -> tuple[float, bool]:
        """Seconds until the prompt's KV is in the worker's engine; and whether it gets there without prefill."""
        ask, card, estimates, prefill = self._ask, self._card, self._estimates, self._prefill
        if worker.role is Role.COLOCATED:
            return self._here(worker).cost_s, False
        if prefill is None:
            return 0.0, False
        num_hot = ask.num_hot(worker.worker)
        left_tokens = ask.num_tokens - num_hot * card.chunk_tokens
        kv_s = prefill.cost_s
        if prefill.worker.node != worker.node:
            kv_s += estimates.pull_s(prefill.worker.node, worker.node, left_tokens * card.kv_bytes_per_token)
        if may_begin and num_hot > 0 and left_tokens < card.chunk_tokens:
            alone_s = estimates.queue_s(worker) + estimates.prefill_s(
                worker, ask.num_tokens, ask.num_tokens - left_tokens
            )
            if alone_s <= kv_s:
                return alone_s, True
        return kv_s, False


def _needed_tokens(ask: Ask, worker: WorkerLoad) -> int:
    """KV that the request may come to need there."""
    left = worker.limit_tokens - ask.num_tokens
    return ask.num_tokens + min(left, ask.max_tokens if ask.max_tokens is not None else left)
