"""Least recently used first."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic

from halfmoon.eviction.contract import ChunkFacts, K, Prompt


class Lru(Generic[K]):
    """Of chunks last used by the same prompt the deepest goes first: without it its prefix is still of use."""

    may_refuse = False

    def __init__(self) -> None:
        self._last_use: dict[K, int] = {}
        """Number of the prompt that used the chunk last."""
        self._by_prompt: OrderedDict[int, dict[K, None]] = OrderedDict()
        """In the order of the prompts, as their numbers rise; no empty ones."""

    def insert(self, key: K, facts: ChunkFacts[K], prompt: Prompt) -> None:
        if key in self._last_use:
            raise ValueError(f"chunk {key!r} is in the pool already")
        self._add(key, prompt)

    def access(self, key: K, prompt: Prompt) -> None:
        self._take(key)
        self._add(key, prompt)

    def remove(self, key: K, *, evicted: bool = True) -> None:
        self._take(key)

    def victims(self, num_chunks: int, evictable: Callable[[K], bool]) -> list[K]:
        chosen: list[K] = []
        for used in self._by_prompt.values():
            for key in reversed(used):
                if len(chosen) >= num_chunks:
                    return chosen
                if evictable(key):
                    chosen.append(key)
        return chosen

    def __len__(self) -> int:
        return len(self._last_use)

    def _add(self, key: K, prompt: Prompt) -> None:
        self._last_use[key] = prompt.number
        self._by_prompt.setdefault(prompt.number, {})[key] = None

    def _take(self, key: K) -> None:
        number = self._last_use.pop(key)
        used = self._by_prompt[number]
        del used[key]
        if not used:
            del self._by_prompt[number]
