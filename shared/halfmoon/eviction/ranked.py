"""Policies that give each chunk a rank, which only its own use changes: the lowest goes first."""

import heapq
from collections.abc import Callable
from typing import Generic

from halfmoon.eviction.contract import ChunkFacts, K, Prompt

_MIN_STALE = 64
_Rank = tuple[int, int, int]


class _Ranked(Generic[K]):
    """A heap whose outdated entries are skipped when they are met, and swept when they are the most."""

    may_refuse = False

    def __init__(self) -> None:
        self._ranks: dict[K, _Rank] = {}
        self._heap: list[tuple[_Rank, K]] = []
        self._num_reports = 0

    def remove(self, key: K, *, evicted: bool = True) -> None:
        del self._ranks[key]

    def victims(self, num_chunks: int, evictable: Callable[[K], bool]) -> list[K]:
        chosen: list[K] = []
        met: list[tuple[_Rank, K]] = []
        while self._heap and len(chosen) < num_chunks:
            rank, key = heapq.heappop(self._heap)
            if self._ranks.get(key) != rank:
                continue
            met.append((rank, key))
            if evictable(key):
                chosen.append(key)
        for entry in met:
            heapq.heappush(self._heap, entry)
        return chosen

    def __len__(self) -> int:
        return len(self._ranks)

    def _tick(self) -> int:
        """A number that no other report has, so that no two ranks are equal."""
        self._num_reports += 1
        return self._num_reports

    def _rank(self, key: K, rank: _Rank) -> None:
        self._ranks[key] = rank
        heapq.heappush(self._heap, (rank, key))
        if len(self._heap) > 2 * len(self._ranks) + _MIN_STALE:
            self._heap = [(live, name) for name, live in self._ranks.items()]
            heapq.heapify(self._heap)


class Lfu(_Ranked[K]):
    """Least frequently used first, counted while in the pool; of those the least recently used."""

    def insert(self, key: K, facts: ChunkFacts[K], prompt: Prompt) -> None:
        if key in self._ranks:
            raise ValueError(f"chunk {key!r} is in the pool already")
        self._rank(key, (1, self._tick(), 0))

    def access(self, key: K, prompt: Prompt) -> None:
        num_uses, _, _ = self._ranks[key]
        self._rank(key, (num_uses + 1, self._tick(), 0))


class LengthAware(_Ranked[K]):
    """As LFU, but of the chunks used equally often the deepest goes first: the ends of the longest prompts.

    The LengthAwareCache of Mooncake (Qin et al., FAST '25).
    """

    def insert(self, key: K, facts: ChunkFacts[K], prompt: Prompt) -> None:
        if key in self._ranks:
            raise ValueError(f"chunk {key!r} is in the pool already")
        self._rank(key, (1, -facts.depth, self._tick()))

    def access(self, key: K, prompt: Prompt) -> None:
        num_uses, minus_depth, _ = self._ranks[key]
        self._rank(key, (num_uses + 1, minus_depth, self._tick()))
