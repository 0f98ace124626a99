"""A prompt's cached prefix as nodes see it: what each holds of it, what the rest costs to pull, and from where. Pure.

Consecutive chunks mostly have the same holders, so the prefix is looked at in runs:

    chunks    0 1 2 3 4 5 6 7 8 9
    holders   ╰─ a b c ─╯ ╰ a ─╯ b      three runs
"""

import heapq
import itertools
import zlib
from collections.abc import Mapping, Sequence

import msgspec

from halfmoon.scheduling.estimates import Estimates
from halfmoon.scheduling.index import Match
from halfmoon.schemas.ids import NodeId
from halfmoon.schemas.kv_tier import ChunkSource

MAX_PRICED_HOLDERS = 6
"""Of a run that many hold, so many are weighed as its source: what more would gain is less than what looking costs."""
MAX_SOURCES = 3
"""Nodes named per chunk: one may have evicted it meanwhile, hardly three."""
_NOBODY: frozenset[NodeId] = frozenset()


class Held(msgspec.Struct, frozen=True):
    """What a node has itself."""

    num_leading: int = 0
    """Chunks from the first on, without a gap."""
    read_s: float = 0.0
    """To get those of them that are on its SSD only."""


class Pull(msgspec.Struct, frozen=True):
    """What it takes to have the whole prefix."""

    num_chunks: int
    """That come from other nodes."""
    total_s: float


class _Run(msgspec.Struct, frozen=True):
    """Consecutive chunks with the same holders."""

    holders: frozenset[NodeId]
    on_ssd: frozenset[NodeId]
    num_chunks: int
    priced: Sequence[NodeId]
    """The holders that are weighed as its source."""


NOTHING = Held()


class CachedPrefix:
    """One match, priced for any node. Keeps what it has worked out."""

    def __init__(self, match: Match, chunk_bytes: int, estimates: Estimates, salt: str) -> None:
        """`salt` spreads requests over the holders where only some are priced: the request's id."""
        self._chunk_bytes = chunk_bytes
        self._estimates = estimates
        self._salt = zlib.crc32(f"{salt}\0".encode())
        self._runs = [
            _Run(holders, on_ssd, sum(1 for _ in run), self._some(holders))
            for (holders, on_ssd), run in itertools.groupby(
                itertools.zip_longest(match.holders, match.on_ssd, fillvalue=_NOBODY)
            )
        ]
        self.holders = _NOBODY.union(*(run.holders for run in self._runs))
        self._held: dict[NodeId, Held] = {}
        self._pulls: dict[NodeId, Pull] = {}

    def on(self, node: NodeId) -> Held:
        if node not in self.holders:
            return NOTHING
        held = self._held.get(node)
        if held is None:
            held = self._held[node] = self._look_at(node)
        return held

    def pull_to(self, node: NodeId) -> Pull:
        """From the cheapest holder of each run; one source after the other, since they share the node's link."""
        pull = self._pulls.get(node)
        if pull is None:
            pull = self._pulls[node] = self._price(node)
        return pull

    def distance(self, node: NodeId) -> int:
        """To the nearest holder of the last chunk; 0 where nothing is cached."""
        if not self._runs or node in self._runs[-1].holders:
            return 0
        return min(self._estimates.distance(holder, node) for holder in self._runs[-1].priced)

    def sources(
        self, num_chunks: int, node: NodeId, epochs: Mapping[NodeId, int]
    ) -> tuple[tuple[ChunkSource, ...], ...]:
        """For each of the first `num_chunks`, where to get it, best first: this node, then as `pull_to` weighs them."""
        named: list[tuple[ChunkSource, ...]] = []
        for run in self._runs:
            left = num_chunks - len(named)
            if left <= 0:
                break
            own = [node] if node in run.holders else []
            others = sorted((each for each in run.priced if each != node), key=lambda each: self._key(run, each, node))
            best = tuple(ChunkSource(node=each, epoch=epochs[each]) for each in [*own, *others][:MAX_SOURCES])
            named += [best] * min(left, run.num_chunks)
        return tuple(named)

    def _look_at(self, node: NodeId) -> Held:
        num_leading = num_on_ssd = 0
        for run in self._runs:
            if node not in run.holders:
                break
            num_leading += run.num_chunks
            num_on_ssd += run.num_chunks if node in run.on_ssd else 0
        if not num_on_ssd:
            return Held(num_leading)
        return Held(num_leading, self._estimates.pull_s(node, node, num_on_ssd * self._chunk_bytes, from_ssd=True))

    def _price(self, node: NodeId) -> Pull:
        num_chunks: dict[tuple[NodeId, bool], int] = {}
        for run in self._runs:
            if node in run.holders:
                source = node
                if node not in run.on_ssd:
                    continue
            elif len(run.priced) == 1:
                source = run.priced[0]
            else:
                source = min(run.priced, key=lambda each, run=run: self._key(run, each, node))  # type: ignore[misc]
            way = (source, source in run.on_ssd)
            num_chunks[way] = num_chunks.get(way, 0) + run.num_chunks
        total_s = sum(
            self._estimates.pull_s(source, node, count * self._chunk_bytes, from_ssd=from_ssd)
            for (source, from_ssd), count in num_chunks.items()
        )
        return Pull(sum(count for (source, _), count in num_chunks.items() if source != node), total_s)

    def _key(self, run: _Run, holder: NodeId, node: NodeId) -> tuple[float, ...]:
        """What orders the holders of a run as sources for a node; equals by lot."""
        num_bytes = run.num_chunks * self._chunk_bytes
        return (
            self._estimates.pull_s(holder, node, num_bytes, from_ssd=holder in run.on_ssd),
            self._estimates.distance(holder, node),
            self._lot(holder),
        )

    def _some(self, nodes: frozenset[NodeId]) -> Sequence[NodeId]:
        """A few of many, by lot: others for other requests, the same in every conductor."""
        if len(nodes) <= MAX_PRICED_HOLDERS:
            return tuple(nodes)
        return tuple(heapq.nsmallest(MAX_PRICED_HOLDERS, nodes, key=self._lot))

    def _lot(self, node: NodeId) -> int:
        return zlib.crc32(node.encode(), self._salt)
