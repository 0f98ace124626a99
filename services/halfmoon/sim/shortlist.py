"""Of many instances, those that a decision is worth weighing: holders of the prefix, the idlest, and some by turns.

A policy looks at each worker that it is given. Where there are hundreds, nearly all are neither near the request's KV
nor idler than others. A policy that looks at nothing (`round_robin`, `random`) gets a window that passes over all.
"""

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from halfmoon.scheduling.index import Match
from halfmoon.scheduling.policies import PolicyName
from halfmoon.schemas.ids import NodeId

WHOLE = 64
"""So many are weighed without a choice."""
NUM_HOLDERS = 8
NUM_IDLE = 8


class _Instance(Protocol):
    node: NodeId


I = TypeVar("I", bound=_Instance)  # noqa: E741


class Shortlist(Generic[I]):
    """Over instances of one role."""

    def __init__(self, policy: PolicyName, seed: int, instances: Iterable[I] = ()) -> None:
        self._policy = policy
        self._random = random.Random(seed)
        self._instances: list[I] = []
        self._places: dict[NodeId, int] = {}
        for instance in instances:
            self.add(instance)

    def add(self, instance: I) -> None:
        self._places[instance.node] = len(self._instances)
        self._instances.append(instance)

    def of(self, loads: Callable[[Sequence[I]], NDArray[np.float64]], match: Match, turn: int) -> Sequence[I]:
        """`loads`: of each instance, the less the idler; asked only where there are too many."""
        instances = self._instances
        if len(instances) <= WHOLE:
            return instances
        if self._policy is PolicyName.ROUND_ROBIN:
            # The policy takes turns within what it is given, so whole windows pass one after the other.
            begin = turn // WHOLE * WHOLE % (len(instances) // WHOLE * WHOLE)
            return instances[begin : begin + WHOLE]
        if self._policy is PolicyName.RANDOM:
            return self._random.sample(instances, NUM_IDLE)
        idle = np.argsort(loads(instances), kind="stable")[:NUM_IDLE].tolist()
        return [instances[place] for place in sorted({*idle, *self._near(match)})]

    def _near(self, match: Match) -> Iterable[int]:
        """Holders of the prefix, those of the longest part of it first."""
        holders: list[NodeId] = []
        seen: frozenset[NodeId] | None = None
        for nodes in reversed(match.holders):
            if nodes is not seen:
                holders += heapq.nsmallest(NUM_HOLDERS - len(holders), nodes.difference(holders))
                seen = nodes
            if len(holders) >= NUM_HOLDERS:
                break
        return (self._places[node] for node in holders if node in self._places)
