"""The SSD tier of one node: files and the book of them, kept in step, with blocking work in threads of its own.

Nothing here raises because of the disk. What can't be written stays in DRAM or is evicted, what can't be read is
computed again; a disk that fails is left alone for a while, and that is logged once and shown in stats and metrics.
"""

import asyncio
import contextlib
import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog

from halfmoon.kv_tier.quotas import TierBook
from halfmoon.kv_tier.ssd.book import SsdBook, SsdChunk, in_order_of_use
from halfmoon.kv_tier.ssd.breaker import Breaker
from halfmoon.kv_tier.ssd.directory import SsdDirectory
from halfmoon.kv_tier.ssd.file import BadFile, FileBody
from halfmoon.kv_tier.tenant_policies import Policy
from halfmoon.schemas.chunks import ChunkMeta, EvictReason
from halfmoon.schemas.ids import ChunkKey, TenantId

R = TypeVar("R")

_READ_FAILURES_TOLERATED = 2
"""One bad block is no bad disk."""
_SILENCE_S = 5.0
"""A read that takes longer hangs."""
_CLOSE_TIMEOUT_S = 5.0


class NotRead(Exception):
    """A chunk that isn't to be had from the SSD. `is_damaged`: its file was there, and wrong."""

    def __init__(self, detail: str, *, is_damaged: bool = False) -> None:
        super().__init__(detail)
        self.is_damaged = is_damaged


@dataclass(slots=True)
class SsdCounters:
    """Since the start."""

    writes: int = 0
    bytes_written: int = 0
    reads: int = 0
    bytes_read: int = 0
    errors: int = 0
    """Reads and writes that the disk failed, or didn't end in time."""
    evictions: int = 0
    removed: Counter[str] = field(default_factory=Counter)
    """Files that could not be served, by `BadReason`, and those that somebody else took away (`missing`)."""


class SsdStore:
    """Not thread-safe: for the event loop. `close` waits until no thread reads or writes a slot any more."""

    def __init__(
        self,
        directory: SsdDirectory,
        make_policy: Callable[[], Policy],
        quotas: TierBook,
        limit_bytes: int,
        log: structlog.stdlib.BoundLogger,
        *,
        threads: int = 4,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`threads` read at once, and half as many write."""
        self.directory = directory
        self.limit_bytes = limit_bytes
        self.book = SsdBook(make_policy, limit_bytes, quotas)
        self.counters = SsdCounters()
        self.write_breaker = Breaker()
        self.read_breaker = Breaker(tolerance=_READ_FAILURES_TOLERATED)
        self.on_gone: Callable[[Sequence[SsdChunk], EvictReason], None] = _nobody
        """Told of chunks that have left the tier by themselves: evicted, or found to be damaged."""
        self._log = log.bind(ssd_dir=str(directory.root))
        self._clock_ns = clock_ns
        self.num_writers = max(1, threads // 2)
        self._readers = ThreadPoolExecutor(threads, "ssd-read")
        self._writers = ThreadPoolExecutor(self.num_writers, "ssd-write")
        self._reading: dict[int, float] = {}
        """Threads that read now, and when they began."""
        self._removing: Counter[ChunkKey] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def load(self, max_age_s: float | None) -> list[ChunkMeta]:
        """Take in what an earlier life left, by headers alone; those chunks. Raises OSError."""
        scan = await self._run(self._readers, self.directory.scan, max_age_s, self._log)
        for body in in_order_of_use(scan.found):
            self._forget(self.book.own_victims(body.meta) or (), EvictReason.CAPACITY)
            if self.book.add(body, self._clock_ns()) is None:
                self._unlink([body.meta.key])
        self.counters.removed.update(scan.removed)
        self.counters.errors += scan.num_unreadable
        while excess := self.book.victims(0):
            self._forget(excess, EvictReason.CAPACITY)
        await self.settled()
        return list(self.book.metas())

    def __contains__(self, key: object) -> bool:
        return key in self.book

    def find(self, key: ChunkKey) -> SsdChunk | None:
        return self.book.find(key)

    def metas(self) -> Iterator[ChunkMeta]:
        """Of every chunk that can be read here. Not to be held over an await."""
        return self.book.metas()

    def remove(self, keys: Iterable[ChunkKey]) -> list[ChunkMeta]:
        """Give these chunks up; those that were here. `on_gone` isn't told. Their files go soon: see `settled`."""
        gone: list[ChunkMeta] = []
        for key in keys:
            chunk = self.book.remove(key, evicted=False)
            if chunk is not None:
                gone.append(chunk.meta)
                self._unlink([key])
        return gone

    async def settled(self) -> None:
        """Wait until every file that was given up so far is gone."""
        while waiting := [task for task in self._tasks if not task.done()]:
            await asyncio.wait(waiting)

    @property
    def can_write(self) -> bool:
        return not self.write_breaker.is_open(self._clock_ns())

    @property
    def failure(self) -> str:
        """Why the disk is left alone, or was when it was last tried; empty when all is well."""
        broken = [breaker.reason for breaker in (self.write_breaker, self.read_breaker) if breaker.is_broken]
        return broken[0] if broken else ""

    def unreadable(self) -> str | None:
        """Why there is no sense in waiting for a read: one has been on its way for too long, or several failed."""
        now_s = time.monotonic()
        is_open = self.read_breaker.is_open(self._clock_ns())
        if not is_open and any(now_s - began_s > _SILENCE_S for began_s in list(self._reading.values())):
            self._read_failed(f"a read takes longer than {_SILENCE_S:g} s")
            is_open = self.read_breaker.is_open(self._clock_ns())
        if not is_open:
            return None
        return f"the SSD is left alone for a while: {self.read_breaker.reason}"

    async def write(self, meta: ChunkMeta, traceparent: str | None, padded: memoryview) -> bool:
        """Write a chunk from its slot; whether the tier has it now. `padded` is the payload to the end of its page.

        The slot must stay as it is until this returns; it isn't cancelled in the middle of a write.
        """
        key = meta.key
        if key in self.book:
            return True
        if not self.can_write or self.book.is_coming(key) or key in self._removing:
            return False
        own = self.book.own_victims(meta)
        if own is None:
            return False
        self._forget(own, EvictReason.CAPACITY)
        self.book.begin(meta)
        body = FileBody(meta=meta, traceparent=traceparent)
        try:
            if not await self._make_room(meta.tenant):
                return False
            await self._run(self._writers, self.directory.write, body, padded)
        except OSError as error:
            self._write_failed(error)
            return False
        except ValueError as error:
            self._log.warning("a chunk can't be written to the SSD", error=str(error))
            return False
        else:
            self.counters.writes += 1
            self.counters.bytes_written += meta.num_bytes
            if self.write_breaker.succeeded(self._clock_ns()):
                self._log.info("the SSD can be written again")
            if self.book.finish(body, self._clock_ns()) is None:
                self._unlink([key])
                return False
            return True
        finally:
            self.book.abandon(key)

    async def read(self, key: ChunkKey, padded: memoryview) -> FileBody:
        """Read a chunk into a slot, with its checksum compared. Raises `NotRead`.

        As with `write`, the slot is this read's until it returns.
        """
        chunk = self.book.find(key)
        if chunk is None:
            raise NotRead("it isn't on the SSD any more")
        if (why := self.unreadable()) is not None:
            raise NotRead(why)
        try:
            body = await self._run(self._readers, self._read, key, padded)
        except BadFile as error:
            self.counters.removed[error.reason] += 1
            self._log.warning("a damaged file of the SSD tier is removed", key=key.hex(), detail=str(error))
            self._lose(chunk)
            raise NotRead(str(error), is_damaged=True) from None
        except FileNotFoundError:
            if self.book.find(key) is chunk:
                self.counters.removed["missing"] += 1
                self._lose(chunk)
            raise NotRead("its file is gone") from None
        except OSError as error:
            self._lose(chunk)
            self._read_failed(error.strerror or str(error))
            raise NotRead(f"the SSD fails: {error.strerror or error}") from None
        if self.book.find(key) is None:
            raise NotRead("it was given up meanwhile")
        self.counters.reads += 1
        self.counters.bytes_read += body.meta.num_bytes
        if self.read_breaker.succeeded(self._clock_ns()):
            self._log.info("the SSD can be read again")
        return body

    async def close(self) -> None:
        """Idempotent. What hangs in the disk is left behind after a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self.settled()
        pools = self._readers, self._writers
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        ending = asyncio.gather(*(asyncio.to_thread(pool.shutdown) for pool in pools))
        done, _ = await asyncio.wait([ending], timeout=_CLOSE_TIMEOUT_S)
        if not done:
            self._log.error("the SSD still hasn't answered; its threads are left behind")
        self.directory.close()

    def check_integrity(self) -> None:
        self.book.check_integrity()

    async def _make_room(self, tenant: TenantId) -> bool:
        """Evict so that what the book expects fits; False where too little may go. Raises OSError where the disk is
        full of other things."""
        free_bytes = await self._run(self._writers, self.directory.free_bytes)
        self.book.limit_bytes = min(self.limit_bytes, self.book.num_bytes + free_bytes)
        removal = self._forget(self.book.victims(0, tenant), EvictReason.CAPACITY)
        if removal is not None:
            await removal
        if self.book.num_bytes + self.book.num_bytes_coming <= self.book.limit_bytes:
            return True
        if self.book.limit_bytes < self.limit_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return False

    def _read(self, key: ChunkKey, padded: memoryview) -> FileBody:
        """In a thread."""
        thread = threading.get_ident()
        self._reading[thread] = time.monotonic()
        try:
            return self.directory.read(key, padded)
        finally:
            del self._reading[thread]

    def _read_failed(self, reason: str) -> None:
        self.counters.errors += 1
        if self.read_breaker.failed(self._clock_ns(), reason):
            self._log.error("the SSD can't be read: its chunks are computed again meanwhile", error=reason)

    def _write_failed(self, error: OSError) -> None:
        self.counters.errors += 1
        reason = error.strerror or str(error)
        if self.write_breaker.failed(self._clock_ns(), reason):
            self._log.error("the SSD can't be written: the pool goes on with DRAM only", error=reason)

    def _forget(self, keys: Collection[ChunkKey], reason: EvictReason) -> asyncio.Task[None] | None:
        """Chunks that leave by themselves; the removal of their files, where there are any."""
        is_eviction = reason is EvictReason.CAPACITY
        gone = [chunk for key in keys if (chunk := self.book.remove(key, evicted=is_eviction)) is not None]
        if not gone:
            return None
        self.counters.evictions += is_eviction * len(gone)
        removal = self._unlink([chunk.meta.key for chunk in gone])
        self.on_gone(gone, reason)
        return removal

    def _lose(self, chunk: SsdChunk) -> None:
        """This chunk can't be had any more."""
        if self.book.find(chunk.meta.key) is chunk:
            self._forget([chunk.meta.key], EvictReason.CORRUPT)

    def _unlink(self, keys: Sequence[ChunkKey]) -> asyncio.Task[None]:
        """Remove files in a thread. None of these chunks is written meanwhile."""
        self._removing.update(keys)
        removal = asyncio.get_running_loop().create_task(self._unlink_now(keys))
        self._tasks.add(removal)
        removal.add_done_callback(self._tasks.discard)
        return removal

    async def _unlink_now(self, keys: Sequence[ChunkKey]) -> None:
        try:
            for key in keys:
                await self._run(self._writers, self.directory.remove, key)
        except OSError as error:
            self._write_failed(error)
        finally:
            self._removing.subtract(keys)
            self._removing = +self._removing

    async def _run(self, pool: ThreadPoolExecutor, function: Callable[..., R], *arguments: Any) -> R:
        """In a thread; a caller that is cancelled still waits until the thread has let go of what it was given."""
        running = asyncio.get_running_loop().run_in_executor(pool, lambda: function(*arguments))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise


def _nobody(gone: Sequence[SsdChunk], reason: EvictReason) -> None:
    pass
