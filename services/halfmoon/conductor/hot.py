"""Which engine holds which chunk in its own prefix cache, as far as the workers have told. Pure.

Told over a channel that may lose messages. So each is numbered: from a gap on, what a worker had told is no more
relied on, until it has told everything anew.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from halfmoon.schemas.caches import MAX_CACHE_PARTS, CacheChanges, CacheSnapshot, WorkerCache
from halfmoon.schemas.ids import ChunkKey, WorkerId


@dataclass(slots=True)
class _Cache:
    """One worker's, in one life."""

    started_ns: int
    seq: int = 0
    keys: set[ChunkKey] | None = None
    """None: not known, because nothing has been told yet or something was missed."""
    parts: list[tuple[ChunkKey, ...]] = field(default_factory=list)
    """Of the snapshot that is being told, from its first on."""

    def hear(self, message: WorkerCache) -> None:
        is_next = message.seq == self.seq + 1
        self.seq = message.seq
        if not is_next:
            self.keys = None
            self.parts.clear()
        match message:
            case CacheSnapshot():
                self._put_part(message)
            case CacheChanges():
                self.parts.clear()
                if self.keys is not None:
                    self.keys.difference_update(message.removed)
                    self.keys.update(message.added)
            case _ as unreachable:
                assert_never(unreachable)

    def _put_part(self, snapshot: CacheSnapshot) -> None:
        if snapshot.part == 0:
            self.parts.clear()
        if snapshot.part != len(self.parts) or not snapshot.part < snapshot.num_parts <= MAX_CACHE_PARTS:
            self.parts.clear()
            return
        self.parts.append(snapshot.keys)
        if len(self.parts) == snapshot.num_parts:
            self.keys = {key for part in self.parts for key in part}
            self.parts.clear()


class HotIndex:
    """Worker → chunk keys. The owner forgets each worker when its life has ended."""

    def __init__(self) -> None:
        self._caches: dict[WorkerId, _Cache] = {}

    def hear(self, message: WorkerCache) -> None:
        """Take in one message. Those of an older life change nothing; the first of a newer one ends the older."""
        cache = self._caches.get(message.worker)
        if cache is not None and message.started_ns < cache.started_ns:
            return
        if cache is None or message.started_ns > cache.started_ns:
            cache = self._caches[message.worker] = _Cache(message.started_ns)
        cache.hear(message)

    def forget(self, worker: WorkerId) -> None:
        self._caches.pop(worker, None)

    def num_chunks(self) -> dict[WorkerId, int]:
        """How many are known of each worker that tells; 0 while something of it was missed."""
        return {worker: len(cache.keys or ()) for worker, cache in self._caches.items()}

    def leading(self, keys: Sequence[ChunkKey]) -> Mapping[WorkerId, int]:
        """How many of a prompt's chunks each worker has hot, from the first on without a gap; only those with any."""
        counts: dict[WorkerId, int] = {}
        if not keys:
            return counts
        first = keys[0]
        for worker, cache in self._caches.items():
            if cache.keys is None or first not in cache.keys:
                continue
            counts[worker] = next((at for at, key in enumerate(keys) if key not in cache.keys), len(keys))
        return counts
