"""A prompt's cached prefix as nodes see it: what each holds of it, and what the rest costs to pull. Pure.

Consecutive chunks mostly have the same holders, so the prefix is looked at in runs:

    chunks    0 1 2 3 4 5 6 7 8 9
    holders   ╰─ a b c ─╯ ╰ a ─╯ b      three runs
"""

import heapq
import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from halfmoon.scheduling.estimates import Estimates
from halfmoon.scheduling.index import Match
from halfmoon.schemas.ids import NodeId

MAX_PRICED_HOLDERS = 6
"""Of a run that many hold, so many are weighed as its source: what more would gain is less than what looking costs."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a node has itself."""

    num_leading: int = 0
    """Chunks from the first on, without a gap."""
    read_s: float = 0.0
    """To get those among them that are on its SSD only."""


@dataclass(frozen=True, slots=True)
class Pull:
    """What it takes to have the whole prefix."""

    num_chunks: int
    """That come from other nodes."""
    total_s: float


NOTHING = Held()


class CachedPrefix:
    """One match, priced for any node. Keeps what it has worked out."""

    def __init__(self, match: Match, chunk_bytes: int, estimates: Estimates, salt: str) -> None:
        """`salt` spreads requests over the holders where only some are priced."""
        self._chunk_bytes = chunk_bytes
        self._estimates = estimates
        self._runs = [(nodes, sum(1 for _ in run)) for nodes, run in itertools.groupby(match.holders)]
        self._holders = frozenset[NodeId]().union(*(nodes for nodes, _ in self._runs))
        self._held: dict[NodeId, Held] = {}
        self._pulls: dict[NodeId, Pull] = {}
        self._priced = [_some(nodes, salt) for nodes, _ in self._runs]

    def on(self, node: NodeId) -> Held:
        if node not in self._holders:
            return NOTHING
        held = self._held.get(node)
        if held is None:
            counts = itertools.takewhile(lambda run: node in run[0], self._runs)
            held = self._held[node] = Held(sum(count for _, count in counts))
        return held

    def pull_to(self, node: NodeId) -> Pull:
        """From the cheapest holder of each run; one source after the other, since they share the node's link."""
        pull = self._pulls.get(node)
        if pull is None:
            num_chunks: dict[NodeId, int] = {}
            for (nodes, count), priced in zip(self._runs, self._priced, strict=True):
                if node not in nodes:
                    source = priced[0] if len(priced) == 1 else self._cheapest(priced, node, count)
                    num_chunks[source] = num_chunks.get(source, 0) + count
            total_s = sum(
                self._estimates.pull_s(source, node, count * self._chunk_bytes) for source, count in num_chunks.items()
            )
            pull = self._pulls[node] = Pull(sum(num_chunks.values()), total_s)
        return pull

    def distance(self, node: NodeId) -> int:
        """To the nearest holder of the last chunk; 0 where nothing is cached."""
        if not self._priced:
            return 0
        return min(self._estimates.distance(holder, node) for holder in self._priced[-1])

    def _cheapest(self, holders: Sequence[NodeId], node: NodeId, count: int) -> NodeId:
        num_bytes = count * self._chunk_bytes
        return min(
            holders,
            key=lambda holder: (
                self._estimates.pull_s(holder, node, num_bytes),
                self._estimates.distance(holder, node),
                holder,
            ),
        )


def _some(nodes: frozenset[NodeId], salt: str) -> Sequence[NodeId]:
    """A few of many, by lot: others for other requests, the same in every conductor."""
    if len(nodes) <= MAX_PRICED_HOLDERS:
        return tuple(nodes)
    return tuple(heapq.nsmallest(MAX_PRICED_HOLDERS, nodes, key=lambda node: zlib.crc32(f"{salt}\0{node}".encode())))
