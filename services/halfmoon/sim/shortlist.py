"""Of many instances, those that a decision is worth weighing: holders of the prefix, the idlest, and some by turns.

A policy looks at each worker that it is given. Where there are hundreds, nearly all are neither near the request's KV
nor idler than others. A policy that looks at nothing (`round_robin`, `random`) gets a window that passes over all.
"""

import heapq
import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

from halfmoon.scheduling.index import Match
from halfmoon.scheduling.policies import PolicyName
from halfmoon.schemas.ids import NodeId

WHOLE = 64
"""So many are weighed without a choice."""
NUM_HOLDERS = 8
NUM_IDLE = 16


class _Instance(Protocol):
    node: NodeId


I = TypeVar("I", bound=_Instance)  # noqa: E741


class Shortlist:
    def __init__(self, policy: PolicyName, seed: int) -> None:
        self._policy = policy
        self._random = random.Random(seed)

    def of(self, instances: Sequence[I], loads: Sequence[float], match: Match, turn: int) -> Sequence[I]:
        """`loads`: of each instance, the less the idler."""
        if len(instances) <= WHOLE:
            return instances
        if self._policy is PolicyName.ROUND_ROBIN:
            # The policy takes turns within what it is given, so whole windows pass one after the other.
            begin = turn // WHOLE * WHOLE % (len(instances) // WHOLE * WHOLE)
            return instances[begin : begin + WHOLE]
        if self._policy is PolicyName.RANDOM:
            return self._random.sample(list(instances), NUM_IDLE)
        holders: list[NodeId] = []
        seen: frozenset[NodeId] | None = None
        for nodes in reversed(match.holders):
            if nodes is not seen:
                holders += sorted(nodes.difference(holders))[: NUM_HOLDERS - len(holders)]
                seen = nodes
            if len(holders) >= NUM_HOLDERS:
                break
        near = {place for place, instance in enumerate(instances) if instance.node in holders} if holders else set()
        return [
            instances[place]
            for place in sorted(near.union(heapq.nsmallest(NUM_IDLE, range(len(instances)), loads.__getitem__)))
        ]
