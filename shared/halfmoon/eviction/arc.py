"""ARC, a cache that balances recency against frequency by what it regrets (Megiddo and Modha, FAST '03)."""

from collections import OrderedDict
from collections.abc import Callable
from itertools import chain
from typing import Generic

from halfmoon.eviction.contract import ChunkFacts, K, Prompt


class Arc(Generic[K]):
    """The paper's lists, each from the least to the most recently used:

    ```
    once  (T1)   in the pool, used once since it came      gone_once  (B1)   evicted from `once`
    again (T2)   in the pool, used more often              gone_again (B2)   evicted from `again`
    ```

    A chunk that comes back from `gone_once` says that `once` should have been larger, one from `gone_again` the
    opposite; `target` is what `once` should hold. once + gone_once ≤ capacity, all four ≤ 2 × capacity.
    """

    may_refuse = False

    def __init__(self, capacity: int) -> None:
        """`capacity` is how many chunks the pool holds."""
        self._capacity = capacity
        self._target = 0.0
        self._once: OrderedDict[K, None] = OrderedDict()
        self._again: OrderedDict[K, None] = OrderedDict()
        self._gone_once: OrderedDict[K, None] = OrderedDict()
        self._gone_again: OrderedDict[K, None] = OrderedDict()
        self._newcomer: K | None = None
        """The chunk inserted last, while it is in `once`: room is made for it, so it doesn't count as its part."""
        self._newcomer_came_back = False

    def insert(self, key: K, facts: ChunkFacts[K], prompt: Prompt) -> None:
        if key in self._once or key in self._again:
            raise ValueError(f"chunk {key!r} is in the pool already")
        self._newcomer, self._newcomer_came_back = None, False
        if key in self._gone_once:
            step = max(len(self._gone_again) / len(self._gone_once), 1.0)
            self._target = min(self._capacity, self._target + step)
            del self._gone_once[key]
            self._again[key] = None
        elif key in self._gone_again:
            step = max(len(self._gone_once) / len(self._gone_again), 1.0)
            self._target = max(0.0, self._target - step)
            del self._gone_again[key]
            self._again[key] = None
            self._newcomer_came_back = True
        else:
            self._once[key] = None
            self._newcomer = key
        self._trim()

    def access(self, key: K, prompt: Prompt) -> None:
        if key in self._once:
            del self._once[key]
            if key == self._newcomer:
                self._newcomer = None
        else:
            del self._again[key]
        self._again[key] = None

    def remove(self, key: K, *, evicted: bool = True) -> None:
        held, gone = (self._once, self._gone_once) if key in self._once else (self._again, self._gone_again)
        del held[key]
        if key == self._newcomer:
            self._newcomer = None
        if evicted:
            gone[key] = None
            self._trim()

    def victims(self, num_chunks: int, evictable: Callable[[K], bool]) -> list[K]:
        once = (key for key in self._once if evictable(key))
        again = (key for key in self._again if evictable(key))
        num_once = len(self._once) - (self._newcomer is not None)
        chosen: list[K] = []
        while len(chosen) < num_chunks:
            over = num_once > self._target or (self._newcomer_came_back and num_once == self._target)
            key = next(chain(once, again) if num_once > 0 and over else chain(again, once), None)
            if key is None:
                break
            chosen.append(key)
            num_once -= key in self._once
        return chosen

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def _trim(self) -> None:
        while self._gone_once and len(self._once) + len(self._gone_once) > self._capacity:
            self._gone_once.popitem(last=False)
        while self._gone_again and len(self) + len(self._gone_once) + len(self._gone_again) > 2 * self._capacity:
            self._gone_again.popitem(last=False)
