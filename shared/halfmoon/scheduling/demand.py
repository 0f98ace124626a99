"""How often chunks are asked for: a count of uses that halves with time. Pure; it is told the time."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from halfmoon.schemas.ids import ChunkKey

MAX_CHUNKS: Final = 65_536
"""About 12 MB. Beyond it, those that were asked for longest ago are forgotten."""

_MAX_HALF_LIVES: Final = 200
"""Then all counts are brought down to size."""


class Demand:
    """Each use counts 1 when it comes and half as much every `half_life_s` later.

    At a steady rate of r uses a second the count settles at r × half_life_s / ln 2. A prompt uses its chunks from the
    first on, so along a prefix the counts never rise.
    """

    def __init__(self, half_life_s: float, max_chunks: int = MAX_CHUNKS) -> None:
        self._half_life_s = half_life_s
        self._max_chunks = max_chunks
        self._counts: OrderedDict[ChunkKey, float] = OrderedDict()
        """By forward decay (Cormode et al., 2009): not the old uses shrink, but new ones weigh more. The longest
        unused first."""
        self._origin_s = 0.0
        """When a use weighed 1."""
        self._latest_s = 0.0

    def __len__(self) -> int:
        return len(self._counts)

    def use(self, keys: Sequence[ChunkKey], now_s: float, weight: float = 1.0) -> list[float]:
        """Count one use of each; their counts now."""
        scale = self._scale(now_s)
        counts = self._counts
        grown: list[float] = []
        # From the last to the first: where there are too many, a prefix outlives what follows it.
        for key in reversed(keys):
            count = counts.pop(key, 0.0) + weight * scale
            counts[key] = count
            grown.append(count / scale)
        while len(counts) > self._max_chunks:
            counts.popitem(last=False)
        grown.reverse()
        return grown

    def uses(self, keys: Sequence[ChunkKey], now_s: float) -> list[float]:
        """Their counts now."""
        scale = self._scale(now_s)
        return [self._counts.get(key, 0.0) / scale for key in keys]

    def _scale(self, now_s: float) -> float:
        """What a use weighs now; a clock that goes back stands still."""
        self._latest_s = max(self._latest_s, now_s)
        half_lives = (self._latest_s - self._origin_s) / self._half_life_s
        if half_lives > _MAX_HALF_LIVES:
            shrink = math.exp2(-half_lives)
            for key in self._counts:
                self._counts[key] *= shrink
            self._origin_s = self._latest_s
            return 1.0
        return math.exp2(half_lives)
