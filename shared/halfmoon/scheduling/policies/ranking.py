"""What the policies' rankings have in common: the best few of many, equals by lot, what one node can do alone. Pure."""

import bisect
import heapq
import math
import operator
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from halfmoon.scheduling.cluster import WorkerLoad
from halfmoon.scheduling.contract import Ask, Costs, DecodeChoice, PrefillChoice
from halfmoon.scheduling.estimates import Column
from halfmoon.schemas.model import ModelCard

C = TypeVar("C", PrefillChoice, DecodeChoice)

_COST_S = operator.attrgetter("cost_s")

_ROUNDING = 1e-9
"""A bound and the cost that it bounds are summed in different order."""


def lot(ask: Ask, worker: WorkerLoad) -> int:
    """Equals are drawn by lot, the same for every conductor: else all would begin with the same worker."""
    return zlib.crc32(f"{ask.request_id}\0{worker.worker}".encode())


def best(
    bounds: Column,
    choose: Callable[[int], C],
    key: Callable[[C], tuple[float, ...]],
    num_choices: int,
) -> list[C]:
    """The `num_choices` least by `key`, whose first part is the cost, of what `choose` makes of a worker's place.
    `bounds`: what each worker costs at least.

    The same as choosing for all workers and sorting: once a bound is above the worst of enough choices, no later one
    can be among them.
    """
    bounds = np.asarray(bounds)
    found: list[C] = []
    costs_s: list[float] = []
    """The least, in order."""
    worst_s = math.inf
    """The last of them, where they are enough."""
    for place in bounds.argsort().tolist():
        if bounds.item(place) > worst_s + _ROUNDING:
            break
        choice = choose(place)
        if choice.cost_s <= worst_s:
            found.append(choice)
            bisect.insort(costs_s, choice.cost_s)
            del costs_s[num_choices:]
            if len(costs_s) == num_choices:
                worst_s = costs_s[-1]
    found = [choice for choice in found if choice.cost_s <= worst_s]
    # What comes after the cost matters to equals only, and there seldom are any.
    are_equal = len(found) > len(set(map(_COST_S, found)))
    return sorted(found, key=key if are_equal else _COST_S)[:num_choices]


def local_prefill(ask: Ask, worker: WorkerLoad, card: ModelCard, costs: Costs) -> PrefillChoice:
    """What this worker would do with what its own engine and node hold, and nothing pulled."""
    num_reused, num_hot = ask.match.num_leading(worker.node), ask.num_hot(worker.worker)
    there = min(max(num_reused, num_hot) * card.chunk_tokens, ask.num_tokens)
    estimates = costs.estimates
    cost_s = estimates.queue_s(worker) + estimates.prefill_s(worker, ask.num_tokens, there)
    return PrefillChoice(worker=worker, num_reused=num_reused, num_hot=num_hot, cost_s=cost_s)


def local_prefills(ask: Ask, workers: Iterable[WorkerLoad], card: ModelCard, costs: Costs) -> tuple[PrefillChoice, ...]:
    """The first few workers, each with what it holds; none where prefill has nothing to do."""
    if not ask.has_chunks:
        return ()
    return tuple(local_prefill(ask, worker, card, costs) for worker in list(workers)[: costs.num_choices])


def least(
    workers: Iterable[WorkerLoad], key: Callable[[WorkerLoad], tuple[float, ...]], count: int
) -> list[WorkerLoad]:
    return heapq.nsmallest(count, workers, key=key)


def described(ask: Ask, prefills: Sequence[PrefillChoice], decode: DecodeChoice) -> str:
    """Why the first choices are the first, for a trace."""
    if decode.is_colocated:
        return f"colocated on {decode.worker.node}"
    if decode.is_alone:
        return f"all {decode.num_hot} chunks are hot at {decode.worker.worker}"
    if not prefills:
        return "nothing to prefill"
    first = prefills[0]
    return (
        f"{first.num_reused} of {len(ask.match)} matched chunks reused, {first.num_pulled} of them pulled, "
        f"{first.num_hot} hot; "
        f"{first.worker.queued_tokens} tokens queued ahead; estimated {first.cost_s * 1000:.0f} ms"
    )
