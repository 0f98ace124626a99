"""What the engine's own prefix cache holds, told to the conductors: changes as they come, all of it now and then."""

import asyncio
import time

import structlog

from halfmoon.bus import endpoint
from halfmoon.bus.errors import BusError
from halfmoon.bus.protocol import Bus
from halfmoon.engine.contract import HotChanges
from halfmoon.schemas import subjects
from halfmoon.schemas.caches import (
    CACHE_SNAPSHOT_INTERVAL_S,
    MAX_CACHE_KEYS,
    MAX_CACHE_PARTS,
    CacheChanges,
    CacheSnapshot,
    WorkerCache,
)
from halfmoon.schemas.ids import ChunkKey, WorkerId
from halfmoon.schemas.members import HEARTBEAT_INTERVAL_S
from halfmoon.worker.sequences import EngineCrashed, Sequences


class CacheNews:
    """Turns an engine's changes into numbered messages. Pure: it is told the time.

    Silent until something is hot for the first time, and so for good where the engine has no prefix cache. What goes
    beyond `MAX_CACHE_KEYS * MAX_CACHE_PARTS` chunks isn't told: it is used all the same, only not planned with.
    """

    def __init__(
        self,
        worker: WorkerId,
        started_ns: int,
        *,
        max_keys: int = MAX_CACHE_KEYS,
        max_parts: int = MAX_CACHE_PARTS,
        snapshot_s: float = CACHE_SNAPSHOT_INTERVAL_S,
    ) -> None:
        self._worker = worker
        self._started_ns = started_ns
        self._max_keys = max_keys
        self._max_parts = max_parts
        self._snapshot_s = snapshot_s
        self._hot: set[ChunkKey] = set()
        self._seq = 0
        self._snapshot_at_s: float | None = None
        """When the next one is due; None before the first."""

    def take(self, changes: HotChanges, now_s: float) -> list[WorkerCache]:
        """The messages to send now, in order."""
        before = self._hot
        left = set() if changes.is_reset else before - changes.removed
        room = self._max_keys * self._max_parts - len(left)
        self._hot = left | set(sorted(changes.added - left)[: max(0, room)])
        if self._snapshot_at_s is None:
            return self._snapshot(now_s) if self._hot else []
        added, removed = sorted(self._hot - before), sorted(before - self._hot)
        if now_s >= self._snapshot_at_s or len(added) + len(removed) > self._max_keys:
            return self._snapshot(now_s)
        if not added and not removed:
            return []
        return [
            CacheChanges(
                worker=self._worker,
                started_ns=self._started_ns,
                seq=self._next(),
                added=tuple(added),
                removed=tuple(removed),
            )
        ]

    def not_sent(self) -> None:
        """Something of this got lost on the way out: everything is told anew."""
        if self._snapshot_at_s is not None:
            self._snapshot_at_s = 0.0

    def _snapshot(self, now_s: float) -> list[WorkerCache]:
        self._snapshot_at_s = now_s + self._snapshot_s
        keys = sorted(self._hot)
        parts = [tuple(keys[at : at + self._max_keys]) for at in range(0, len(keys), self._max_keys)] or [()]
        return [
            CacheSnapshot(
                worker=self._worker,
                started_ns=self._started_ns,
                seq=self._next(),
                keys=part,
                part=number,
                num_parts=len(parts),
            )
            for number, part in enumerate(parts)
        ]

    def _next(self) -> int:
        self._seq += 1
        return self._seq


async def tell_cache(bus: Bus, news: CacheNews, sequences: Sequences, log: structlog.stdlib.BoundLogger) -> None:
    """Ask the engine with each heartbeat, and tell. Until cancelled, or the engine has crashed."""
    while True:
        try:
            changes = sequences.hot_changes()
        except EngineCrashed:
            return  # `Sequences` has told whoever ends this worker
        for message in news.take(changes, time.monotonic()):
            try:
                await endpoint.announce(bus, subjects.cache(message.worker), message)
            except BusError as error:
                log.warning("what the engine's cache holds can't be told yet", error=str(error))
                news.not_sent()
                break
        await asyncio.sleep(HEARTBEAT_INTERVAL_S)
