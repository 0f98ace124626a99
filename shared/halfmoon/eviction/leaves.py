"""The chunks that may go, by kind and age: those on which no other chunk in the pool depends."""

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic

from halfmoon.eviction.contract import K
from halfmoon.eviction.hazard import ReuseModel, bucket_end_ns, bucket_of

_MIN_STALE = 64
_Place = tuple[int, int]
"""Kind and age bucket."""


class Leaves(Generic[K]):
    """A queue per kind and age bucket, and a heap of the queues by what a chunk in them is worth.

    Chunks grow older: `advance` moves those that have left their bucket. Each does so at most once per bucket between
    two uses, so all operations are O(log chunks) on average.
    """

    def __init__(self, model: ReuseModel) -> None:
        self._model = model
        self._places: dict[K, tuple[_Place, int]] = {}
        """Where each leaf is, and when it was used last."""
        self._queues: dict[_Place, OrderedDict[K, None]] = {}
        self._heap: list[tuple[float, _Place]] = []
        """Holds each queue that isn't empty, once; and some that are, or have gone."""
        self._listed: set[_Place] = set()
        """The places in the heap."""
        self._moves: list[tuple[int, int, K]] = []
        """When each leaf leaves its bucket, a number that keeps the order, and the leaf; some entries are outdated."""
        self._num_moves = 0

    def __contains__(self, key: K) -> bool:
        return key in self._places

    def add(self, key: K, kind: int, used_ns: int, now_ns: int) -> None:
        bucket = bucket_of(now_ns - used_ns)
        place = kind, bucket
        self._places[key] = place, used_ns
        self._queue(place)[key] = None
        if place not in self._listed:
            self._listed.add(place)
            heapq.heappush(self._heap, (self._model.worth(*place), place))
        end_ns = bucket_end_ns(bucket)
        if end_ns is not None:
            self._num_moves += 1
            heapq.heappush(self._moves, (used_ns + end_ns, self._num_moves, key))

    def discard(self, key: K) -> None:
        """Take it out where it is in."""
        found = self._places.pop(key, None)
        if found is not None:
            del self._queues[found[0]][key]

    def advance(self, now_ns: int) -> None:
        """Move what has grown into the next bucket."""
        while self._moves and self._moves[0][0] <= now_ns:
            at_ns, _, key = heapq.heappop(self._moves)
            found = self._places.get(key)
            if found is None:
                continue
            (kind, bucket), used_ns = found
            end_ns = bucket_end_ns(bucket)
            if end_ns is not None and used_ns + end_ns == at_ns:
                self.discard(key)
                self.add(key, kind, used_ns, now_ns)

    def reprice(self) -> None:
        """The model has been fitted anew: sort the queues by what it says now, and sweep what is outdated."""
        self._queues = {place: queue for place, queue in self._queues.items() if queue}
        self._listed = set(self._queues)
        self._heap = [(self._model.worth(*place), place) for place in self._queues]
        heapq.heapify(self._heap)
        if len(self._moves) > 2 * len(self._places) + _MIN_STALE:
            self._moves = [
                (used_ns + end_ns, number, key)
                for number, (key, ((_, bucket), used_ns)) in enumerate(self._places.items(), self._num_moves)
                if (end_ns := bucket_end_ns(bucket)) is not None
            ]
            self._num_moves += len(self._places)
            heapq.heapify(self._moves)

    def cheapest(self) -> Iterator[tuple[float, K]]:
        """Every leaf with its worth, the one worth least first; in a queue the longest unused. Don't add meanwhile."""
        while self._heap and not self._queues.get(self._heap[0][1]):
            _, place = heapq.heappop(self._heap)
            self._listed.discard(place)
        if not self._heap:
            return
        worth, place = self._heap[0]
        for key in self._queues[place]:
            yield worth, key
        for worth, place in sorted(self._heap)[1:]:
            for key in self._queues.get(place, ()):
                yield worth, key

    def _queue(self, place: _Place) -> OrderedDict[K, None]:
        queue = self._queues.get(place)
        if queue is None:
            queue = self._queues[place] = OrderedDict()
        return queue
