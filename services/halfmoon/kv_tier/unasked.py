"""Chunks that were brought here without a request for them: which were used, and which went unused. Pure."""

from collections import Counter
from collections.abc import Iterable

from halfmoon.schemas.copies import Cause
from halfmoon.schemas.ids import ChunkKey


class Unasked:
    """By cause: `brought = used + wasted + waiting`, always."""

    def __init__(self) -> None:
        self._waiting: dict[ChunkKey, Cause] = {}
        self.brought: Counter[Cause] = Counter()
        self.hits: Counter[Cause] = Counter()
        self.waste: Counter[Cause] = Counter()

    def __len__(self) -> int:
        """Chunks in the pool that nobody has used since they were brought."""
        return len(self._waiting)

    def num_waiting(self, cause: Cause) -> int:
        """The same of one cause."""
        return self.brought[cause] - self.hits[cause] - self.waste[cause]

    def bring(self, key: ChunkKey, cause: Cause) -> None:
        """It is in the pool from now on."""
        if key not in self._waiting:
            self._waiting[key] = cause
            self.brought[cause] += 1

    def used(self, keys: Iterable[ChunkKey]) -> None:
        """A request asks for these, and the pool has them."""
        if self._waiting:
            for key in keys:
                cause = self._waiting.pop(key, None)
                if cause is not None:
                    self.hits[cause] += 1

    def gone(self, key: ChunkKey) -> None:
        """It has left the pool."""
        cause = self._waiting.pop(key, None)
        if cause is not None:
            self.waste[cause] += 1
