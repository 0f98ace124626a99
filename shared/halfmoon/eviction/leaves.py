"""The chunks that may go, by kind and age: those on which no other chunk in the pool depends."""

import heapq
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic

from halfmoon.eviction.contract import K
from halfmoon.eviction.hazard import BOUNDS_NS, NUM_BUCKETS, ReuseModel
from halfmoon.eviction.known import NOWHERE, KnownChunk

_MIN_STALE = 64


class Leaves(Generic[K]):
    """A queue per kind and age bucket, and the queues in the order of what a chunk in them is worth.

    Chunks grow older: `advance` moves those that have left their bucket. Each does so at most once per bucket between
    two uses, so all operations are O(log chunks) on average.
    """

    def __init__(self, model: ReuseModel) -> None:
        self._model = model
        self._queues: dict[int, OrderedDict[KnownChunk[K], None]] = {}
        """By cell: what is worth the same."""
        self._order: list[tuple[float, int]] = []
        """Worth and cell of each queue, the one worth least first; some are empty."""
        self._moves: list[tuple[int, int, KnownChunk[K]]] = []
        """A heap: when each leaf leaves its bucket, a number that keeps the order, and the leaf; some are outdated."""
        self._num_moves = 0

    def add(self, leaf: KnownChunk[K], now_ns: int) -> None:
        self._place(leaf, now_ns)
        if leaf.grows_ns:
            self._num_moves += 1
            heapq.heappush(self._moves, (leaf.grows_ns, self._num_moves, leaf))

    def discard(self, chunk: KnownChunk[K]) -> None:
        """Take it out where it is in."""
        if chunk.cell != NOWHERE:
            del self._queues[chunk.cell][chunk]
            chunk.cell, chunk.grows_ns = NOWHERE, 0

    def advance(self, now_ns: int) -> None:
        """Move what has grown into the next bucket."""
        moves = self._moves
        while moves and moves[0][0] <= now_ns:
            at_ns, _, leaf = moves[0]
            if leaf.grows_ns != at_ns:
                heapq.heappop(moves)
                continue
            del self._queues[leaf.cell][leaf]
            self._place(leaf, now_ns)
            if leaf.grows_ns:
                self._num_moves += 1
                heapq.heapreplace(moves, (leaf.grows_ns, self._num_moves, leaf))
            else:
                heapq.heappop(moves)

    def reprice(self) -> None:
        """The model has been fitted anew: sort the queues by what it says now, and sweep what is outdated."""
        self._queues = {cell: queue for cell, queue in self._queues.items() if queue}
        self._order = sorted((self._model.worth(cell), cell) for cell in self._queues)
        if len(self._moves) > 2 * sum(map(len, self._queues.values())) + _MIN_STALE:
            self._moves = [move for move in self._moves if move[2].grows_ns == move[0]]
            heapq.heapify(self._moves)

    def cheapest(self) -> Iterator[tuple[float, KnownChunk[K]]]:
        """Every leaf with its worth, the one worth least first; in a queue the longest unused. Don't add meanwhile."""
        for worth, cell in self._order:
            for leaf in self._queues[cell]:
                yield worth, leaf

    def _place(self, leaf: KnownChunk[K], now_ns: int) -> None:
        bucket = bisect_right(BOUNDS_NS, now_ns - leaf.used_ns)
        cell = leaf.cell = leaf.kind * NUM_BUCKETS + bucket
        queue = self._queues.get(cell)
        if queue is None:
            queue = self._queues[cell] = OrderedDict()
            insort(self._order, (self._model.worth(cell), cell))
        queue[leaf] = None
        leaf.grows_ns = leaf.used_ns + BOUNDS_NS[bucket] if bucket < NUM_BUCKETS - 1 else 0
