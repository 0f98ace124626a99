"""How often chunks are asked for: a count of uses that halves with time. Pure; it is told the time."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from halfmoon.schemas.ids import ChunkKey

MAX_CHUNKS: Final = 65_536
"""About 15 MB. Beyond it, those that were asked for longest ago are forgotten."""


class Demand:
    """Each use counts 1 when it comes and half as much every `half_life_s` later.

    At a steady rate of r uses a second the count settles at r × half_life_s / ln 2. A prompt uses its chunks from the
    first on, so along a prefix the counts never rise.
    """

    def __init__(self, half_life_s: float, max_chunks: int = MAX_CHUNKS) -> None:
        self._half_life_s = half_life_s
        self._max_chunks = max_chunks
        self._counts: OrderedDict[ChunkKey, tuple[float, float]] = OrderedDict()
        """Uses, and when they were that many; the longest unused first."""

    def __len__(self) -> int:
        return len(self._counts)

    def use(self, keys: Sequence[ChunkKey], now_s: float, weight: float = 1.0) -> list[float]:
        """Count one use of each; their counts now."""
        counts: list[float] = []
        # From the last to the first: where there are too many, a prefix outlives what follows it.
        for key in reversed(keys):
            count = self.uses(key, now_s) + weight
            self._counts[key] = (count, now_s)
            self._counts.move_to_end(key)
            counts.append(count)
        while len(self._counts) > self._max_chunks:
            self._counts.popitem(last=False)
        counts.reverse()
        return counts

    def uses(self, key: ChunkKey, now_s: float) -> float:
        known = self._counts.get(key)
        if known is None:
            return 0.0
        count, at_s = known
        return count * math.exp2((at_s - max(at_s, now_s)) / self._half_life_s)
