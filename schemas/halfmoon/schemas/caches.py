"""What engines hold in their own prefix caches: told by workers on `halfmoon.worker.<id>.cache`, over core NATS.

Soft state. Every message has the next number of its worker's life; who misses one gives the worker no credit until its
next snapshot, which comes every few seconds. Nothing is sent for an engine without a prefix cache.
"""

from halfmoon.schemas.ids import ChunkKey, WorkerId
from halfmoon.schemas.wire import Message

CACHE_SNAPSHOT_INTERVAL_S = 10.0
MAX_CACHE_KEYS = 16_384
"""Keys in one message, at most: 34 bytes each, so about 0.6 MB."""
MAX_CACHE_PARTS = 64


class CacheSnapshot(Message, frozen=True, tag="worker.cache.snapshot.v1"):
    """All that is hot: with the last of its parts, it takes the place of whatever was told before."""

    worker: WorkerId
    started_ns: int
    """The life of the worker, as its heartbeats name it."""
    seq: int
    keys: tuple[ChunkKey, ...]
    part: int = 0
    num_parts: int = 1


class CacheChanges(Message, frozen=True, tag="worker.cache.changes.v1"):
    """What has become hot, and what is hot no longer."""

    worker: WorkerId
    started_ns: int
    seq: int
    added: tuple[ChunkKey, ...] = ()
    removed: tuple[ChunkKey, ...] = ()


WorkerCache = CacheSnapshot | CacheChanges
"""The inbox of `halfmoon.worker.*.cache`."""
