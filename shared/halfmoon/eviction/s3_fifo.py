"""S3-FIFO: three queues, and a quick way out for what is used once (Yang et al., SOSP '23, algorithm 1)."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic

from halfmoon.eviction.contract import ChunkFacts, K, Prompt

_SMALL_SHARE = 0.1
_MAX_USES = 3


class S3Fifo(Generic[K]):
    """`small` takes newcomers, `main` what was used more than once there or came back; `gone` remembers the rest.

    What reaches the head of `main` goes round once more for each use since, of which three count. To ask for victims
    is what moves the queues on; who was named is named first again, until it is reported removed or used.
    """

    may_refuse = False

    def __init__(self, capacity: int) -> None:
        """`capacity` is how many chunks the pool holds; a tenth of it is for newcomers."""
        self._small_target = max(1, int(capacity * _SMALL_SHARE))
        self._max_gone = max(1, capacity - self._small_target)
        self._small: OrderedDict[K, int] = OrderedDict()
        """Uses since it came, ≤ 3; oldest first, as in `main`."""
        self._main: OrderedDict[K, int] = OrderedDict()
        self._gone: OrderedDict[K, None] = OrderedDict()
        self._named: dict[K, None] = {}
        """Victims of the last time that are still here."""

    def insert(self, key: K, facts: ChunkFacts[K], prompt: Prompt) -> None:
        if key in self._small or key in self._main:
            raise ValueError(f"chunk {key!r} is in the pool already")
        if key in self._gone:
            del self._gone[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def access(self, key: K, prompt: Prompt) -> None:
        queue = self._small if key in self._small else self._main
        queue[key] = min(_MAX_USES, queue[key] + 1)
        self._named.pop(key, None)

    def remove(self, key: K, *, evicted: bool = True) -> None:
        self._named.pop(key, None)
        if key not in self._small:
            del self._main[key]
            return
        del self._small[key]
        if evicted:
            self._gone[key] = None
            if len(self._gone) > self._max_gone:
                self._gone.popitem(last=False)

    def victims(self, num_chunks: int, evictable: Callable[[K], bool]) -> list[K]:
        chosen = dict.fromkeys([key for key in self._named if evictable(key)][:num_chunks])
        num_small = len(self._small) - sum(key in self._small for key in chosen)
        while len(chosen) < num_chunks:
            key = self._from_small(chosen, evictable) if num_small > self._small_target else None
            if key is None:
                key = self._from_main(chosen, evictable)
            if key is None:
                key = self._from_small(chosen, evictable)
            if key is None:
                key = self._from_main(chosen, evictable)  # What `small` has just passed on.
            if key is None:
                break
            chosen[key] = None
            num_small -= key in self._small
        self._named = dict(chosen)
        return list(chosen)

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def _from_small(self, chosen: dict[K, None], evictable: Callable[[K], bool]) -> K | None:
        promoted: list[K] = []
        found = None
        for key, num_uses in self._small.items():
            if key in chosen or not evictable(key):
                continue
            if num_uses <= 1:
                found = key
                break
            promoted.append(key)
        for key in promoted:
            del self._small[key]
            self._main[key] = 0
        return found

    def _from_main(self, chosen: dict[K, None], evictable: Callable[[K], bool]) -> K | None:
        for _ in range(_MAX_USES + 1):
            again: list[tuple[K, int]] = []
            found = None
            for key, num_uses in self._main.items():
                if key in chosen or not evictable(key):
                    continue
                if num_uses == 0:
                    found = key
                    break
                again.append((key, num_uses - 1))
            for key, num_uses in again:
                del self._main[key]
                self._main[key] = num_uses
            if found is not None:
                return found
        return None
