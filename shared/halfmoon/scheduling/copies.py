"""How many copies of a chunk there should be, and on which nodes. Pure, and the same wherever it is asked.

One order over the nodes answers both questions that there are about copies: who gets the next one, and who keeps his.
So whoever drops a copy because there are too many never drops the one that another relies on.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from halfmoon.schemas.ids import ChunkKey, NodeId

Labels = Mapping[NodeId, Mapping[str, str]]

MACHINE = "halfmoon.host"
"""Beside an operator's labels: nodes of one machine go with it."""
_DOMAINS = ("zone", "rack", "switch", MACHINE)
"""Labels that name what fails together, the widest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLimits:
    max_copies: int = 3
    """Of one chunk, in all, that demand can bring about."""
    uses_per_copy: float = 8.0
    """Uses, as `Demand` counts them, that one copy is to serve."""
    pinned_copies: int = 2
    """Of a pinned chunk, in all, at least."""


def wanted_copies(uses: float, limits: CopyLimits, *, pinned: bool = False) -> int:
    """In proportion to the demand, from 1 to `max_copies`; of a pinned chunk not below `pinned_copies`."""
    by_demand = min(limits.max_copies, max(1, math.floor(uses / limits.uses_per_copy) + 1))
    return max(by_demand, limits.pinned_copies) if pinned else by_demand


def in_order(key: ChunkKey, nodes: Iterable[NodeId], labels: Labels) -> list[NodeId]:
    """These nodes in the order in which they keep their copies: each next one shares least with those before it.

    Equals come by rendezvous hashing (Thaler and Ravishankar, 1998): the same order everywhere, another for each key.
    """
    left = sorted(nodes, key=lambda node: lot(key, node))
    if not any(labels.get(node) for node in left):
        return left
    ordered: list[NodeId] = []
    while left:
        best = min(left, key=lambda node: nearness(node, ordered, labels))
        left.remove(best)
        ordered.append(best)
    return ordered


def surplus(key: ChunkKey, holders: Iterable[NodeId], wanted: int, labels: Labels) -> frozenset[NodeId]:
    """The holders that may let their copy go. `wanted` of them always keep theirs, and one at the least."""
    return frozenset(in_order(key, holders, labels)[max(1, wanted) :])


def nearness(node: NodeId, others: Iterable[NodeId], labels: Labels) -> int:
    """What `node` shares with the nearest of the others: 4 the machine, 3 a switch, 2 a rack, 1 a zone, else 0."""
    own = labels.get(node, {})
    near = 0
    for other in others:
        theirs = labels.get(other, {})
        for depth, domain in enumerate(_DOMAINS, 1):
            if domain in own and own[domain] == theirs.get(domain):
                near = max(near, depth)
    return near


def lot(key: ChunkKey, node: NodeId) -> bytes:
    """Draws lots between nodes, anew for each key."""
    return hashlib.blake2b(key + node.encode(), digest_size=8).digest()
