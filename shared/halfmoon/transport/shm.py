"""`shm`: between nodes of one host. Maps the peer's arena read-only and copies once.

The generation table behind the slots is read before and after each copy, so bytes of a slot that was freed meanwhile
are never reported as good. Leases aren't enforced here: the arena's file mode is what guards it.
"""

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from halfmoon.pool.arena import Arena, ArenaError
from halfmoon.schemas.ids import LeaseId
from halfmoon.schemas.kv_tier import NodeInfo
from halfmoon.transport.protocol import ReadOutcome, SliceRead, SliceResult
from halfmoon.transport.slices import all_failed, copy, ended, failed

_INLINE_BYTES = 64 << 10
"""Below this a copy is quicker than the way to another thread."""


class ShmTransport:
    """Reads the arenas of peers with this host label."""

    name = "shm"

    def __init__(self, host: str, *, max_mapped: int = 16) -> None:
        """`host`: this process's label. `max_mapped`: arenas kept mapped; the one mapped first makes room."""
        self._host = host
        self._max_mapped = max_mapped
        self._arenas: dict[str, Arena] = {}
        self._copies: set[asyncio.Future[list[SliceResult]]] = set()
        self._closed = False

    def unavailable(self, peer: NodeInfo) -> str | None:
        if self._closed:
            return "the transport is closed"
        if peer.host != self._host:
            return f"node {peer.node} is on host {peer.host!r}, this process on {self._host!r}"
        if peer.arena_path not in self._arenas and not Path(peer.arena_path).exists():
            return f"no arena at {peer.arena_path}: the node has stopped, or the host label isn't true"
        return None

    async def read(
        self, peer: NodeInfo, lease_id: LeaseId, slices: Sequence[SliceRead], *, deadline_ns: int
    ) -> list[SliceResult]:
        if (reason := self.unavailable(peer)) is not None:
            return all_failed(slices, ReadOutcome.UNREACHABLE, reason)
        try:
            arena = self._map(peer)
        except ArenaError as error:
            return all_failed(slices, ReadOutcome.UNREACHABLE, str(error))
        stop = threading.Event()
        if sum(len(each.destination) for each in slices) <= _INLINE_BYTES:
            return _copy_all(arena, slices, deadline_ns, stop)
        work = asyncio.get_running_loop().run_in_executor(None, _copy_all, arena, slices, deadline_ns, stop)
        self._copies.add(work)
        try:
            return await asyncio.shield(work)
        finally:
            # After a cancellation a copy may be under way: the destinations are the caller's again only when it ends.
            stop.set()
            await ended(work)
            self._copies.discard(work)

    async def close(self) -> None:
        self._closed = True
        for work in list(self._copies):
            await ended(work)
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()

    def _map(self, peer: NodeInfo) -> Arena:
        arena = self._arenas.get(peer.arena_path)
        if arena is None:
            arena = Arena.attach(Path(peer.arena_path), peer.slot_bytes, peer.num_slots, writable=False)
            while len(self._arenas) >= self._max_mapped:
                self._arenas.pop(next(iter(self._arenas))).close()
            self._arenas[peer.arena_path] = arena
        return arena


def _copy_all(arena: Arena, slices: Sequence[SliceRead], deadline_ns: int, stop: threading.Event) -> list[SliceResult]:
    return [_copy_one(arena, each, deadline_ns, stop) for each in slices]


def _copy_one(arena: Arena, wanted: SliceRead, deadline_ns: int, stop: threading.Event) -> SliceResult:
    started_ns = time.time_ns()
    if started_ns >= deadline_ns or stop.is_set():
        return failed(ReadOutcome.DEADLINE, "no time left for this slice", started_ns)
    try:
        source = arena.slot(wanted.slot, len(wanted.destination), wanted.offset)
        before = arena.generation(wanted.slot)
        if before == wanted.generation:
            copy(wanted.destination, source)
            before = arena.generation(wanted.slot)
    except ValueError as error:
        return failed(ReadOutcome.REFUSED, str(error), started_ns)
    if before != wanted.generation:
        detail = f"slot {wanted.slot} is in generation {before}, not {wanted.generation}"
        return failed(ReadOutcome.STALE, detail, started_ns)
    return SliceResult(ReadOutcome.OK, started_ns, time.time_ns())
