"""`shm`: between nodes of one host. Maps the peer's arena read-only and copies once.

The tables behind the peer's slots are asked before each copy and again after it: whether the lease is live, and whether
the slot still holds what was leased. So bytes that were read late, or without a lease, are never reported as good.
That guards against mistakes. A process that may open the file can read it all; what guards it is its mode, 0600.
"""

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from halfmoon.pool.arena import Arena, ArenaError
from halfmoon.pool.tables import ArenaTables
from halfmoon.schemas.ids import LeaseId
from halfmoon.schemas.kv_tier import NodeInfo
from halfmoon.transport.protocol import ReadOutcome, SliceRead, SliceResult
from halfmoon.transport.slices import all_failed, all_of, copy, ended, failed, shares

_INLINE_BYTES = 64 << 10
"""Below this a copy is quicker than the way to another thread."""
_SHARE_BYTES = 4 << 20
"""No thread is given less than this where there is more than one."""


class ShmTransport:
    """Reads the arenas of peers with this host label."""

    name = "shm"

    def __init__(self, host: str, *, max_mapped: int = 16, max_threads: int = 4) -> None:
        """`host`: this process's label. `max_mapped`: arenas kept mapped; the one mapped first makes room.

        `max_threads` copy at once, for all reads together. Few saturate a machine's memory; more than its cores are of
        use where the event loop is busy, since each waits for the interpreter lock between two copies.
        """
        self._host = host
        self._max_mapped = max_mapped
        self._max_threads = max_threads
        self._threads = ThreadPoolExecutor(self._max_threads, thread_name_prefix="shm-copy")
        self._arenas: dict[str, Arena] = {}
        self._in_use: Counter[str] = Counter()
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
            return _copy_all(arena, lease_id, slices, deadline_ns, stop)
        loop = asyncio.get_running_loop()
        works = [
            loop.run_in_executor(self._threads, _copy_all, arena, lease_id, share, deadline_ns, stop)
            for share in shares(slices, self._max_threads, _SHARE_BYTES)
        ]
        self._copies.update(works)
        self._in_use[peer.arena_path] += 1
        try:
            return list(itertools.chain.from_iterable(await all_of(works)))
        finally:
            # After a cancellation a copy may be under way: the destinations are the caller's again only when it ends.
            stop.set()
            try:
                await ended(*works)
            finally:
                self._copies.difference_update(works)
                self._in_use[peer.arena_path] -= 1

    async def close(self) -> None:
        self._closed = True
        await ended(*self._copies)
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        await asyncio.to_thread(self._threads.shutdown)

    def _map(self, peer: NodeInfo) -> Arena:
        arena = self._arenas.get(peer.arena_path)
        if arena is None:
            arena = Arena.attach(Path(peer.arena_path), peer.slot_bytes, peer.num_slots, writable=False)
            idle = [path for path in self._arenas if not self._in_use[path]]
            for path in idle[: max(0, len(self._arenas) + 1 - self._max_mapped)]:
                self._arenas.pop(path).close()
                del self._in_use[path]
            self._arenas[peer.arena_path] = arena
        return arena


def refusal(
    tables: ArenaTables, lease_id: LeaseId, slot: int, generation: int, end: int, now_ns: int
) -> tuple[ReadOutcome, str] | None:
    """Why bytes up to `end` of this slot may not be taken now under this lease; None where they may.

    Looks into an arena's tables, which its owner keeps; asks nobody. Raises ValueError for a slot that isn't there.
    """
    if (found := tables.generation(slot)) != generation:
        return ReadOutcome.STALE, f"slot {slot} is in generation {found}, not {generation}"
    expires_ns = tables.lease_expires_ns(lease_id)
    if expires_ns is None and (num_unlisted := tables.num_unlisted_leases):
        return ReadOutcome.UNREACHABLE, f"lease {lease_id} may be one of {num_unlisted} that the arena couldn't list"
    if expires_ns is None or expires_ns <= now_ns:
        return ReadOutcome.REFUSED, f"lease {lease_id} has expired or never was"
    if not (num_bytes := tables.readable_bytes(slot)):
        return ReadOutcome.REFUSED, f"slot {slot} is held by no lease, or is still being written"
    if end > num_bytes:
        return ReadOutcome.REFUSED, f"slot {slot} holds {num_bytes} bytes, {end} were asked for"
    return None


def _copy_all(
    arena: Arena, lease_id: LeaseId, slices: Sequence[SliceRead], deadline_ns: int, stop: threading.Event
) -> list[SliceResult]:
    return [_copy_one(arena, lease_id, each, deadline_ns, stop) for each in slices]


def _copy_one(
    arena: Arena, lease_id: LeaseId, wanted: SliceRead, deadline_ns: int, stop: threading.Event
) -> SliceResult:
    started_ns = time.time_ns()
    if started_ns >= deadline_ns or stop.is_set():
        return failed(ReadOutcome.DEADLINE, "no time left for this slice", started_ns)
    end = wanted.offset + len(wanted.destination)
    try:
        source = arena.slot(wanted.slot, len(wanted.destination), wanted.offset)
        refused = refusal(arena.tables, lease_id, wanted.slot, wanted.generation, end, started_ns)
        if refused is None:
            copy(wanted.destination, source)
            finished_ns = time.time_ns()
            refused = refusal(arena.tables, lease_id, wanted.slot, wanted.generation, end, finished_ns)
    except ValueError as error:
        return failed(ReadOutcome.REFUSED, str(error), started_ns)
    if refused is not None:
        return failed(*refused, started_ns)
    return SliceResult(ReadOutcome.OK, started_ns, finished_ns)
