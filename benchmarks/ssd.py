"""How fast chunks go to an SSD and come back: `make bench ARGS=ssd`; about two minutes. Needs 1 GiB of disk.

The tier beside `dd` and beside plain reads and writes of one large file, all past the page cache, by turns in one run.
The file system is that of the current directory.
"""

import asyncio
import mmap
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from halfmoon.chunks.checksum import checksum
from halfmoon.eviction import PolicyName, make_policy
from halfmoon.kv_tier.quotas import TierBook
from halfmoon.kv_tier.ssd.directory import SsdDirectory
from halfmoon.kv_tier.ssd.store import SsdStore
from halfmoon.pool.arena import Arena
from halfmoon.schemas.chunks import ChunkMeta, Tier
from halfmoon.schemas.ids import ChunkKey, RequestId

HEADING = "## Chunks on an SSD"
CHUNK_BYTES = 4 << 20
NUM_CHUNKS = 96
ROUNDS = 5
THREADS = 4
NUM_SMALL = 20_000
_LIMIT_BYTES = 64 << 30


@dataclass(slots=True)
class Figures:
    gb_per_s: dict[str, list[float]] = field(default_factory=dict)
    """By what was measured, each round's."""
    files_per_s: float = 0.0
    is_direct: bool = True

    def median(self, name: str) -> float:
        return statistics.median(self.gb_per_s[name])

    def ratio(self, name: str, other: str) -> float:
        """Median of the ratios within each round."""
        pairs = zip(self.gb_per_s[name], self.gb_per_s[other], strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


def run() -> Figures:
    figures = Figures()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        arena = Arena.create(Path(shm) / "arena", CHUNK_BYTES, NUM_CHUNKS)
        for number in range(NUM_CHUNKS):
            arena.slot(number)[:] = os.urandom(CHUNK_BYTES)
        for _ in range(ROUNDS):
            asyncio.run(_round(figures, Path(folder), arena))
        figures.files_per_s = asyncio.run(_scan(Path(folder) / "small"))
        arena.close()
    return figures


async def _round(figures: Figures, folder: Path, arena: Arena) -> None:
    large = folder / "large"
    metas = [_meta(number, arena.slot(number)) for number in range(NUM_CHUNKS)]
    ssd = _open(folder / "tier", CHUNK_BYTES)
    figures.is_direct = ssd.directory.is_direct

    async def write(at: int) -> None:
        assert await ssd.write(metas[at], None, arena.slot(at))

    async def read(at: int) -> None:
        await ssd.read(metas[at].key, arena.slot(at))

    async def dd_write() -> None:
        await asyncio.to_thread(_dd, f"if=/dev/zero of={large} oflag=direct")

    async def dd_read() -> None:
        await asyncio.to_thread(_dd, f"if={large} of=/dev/null iflag=direct")

    await _timed(figures, "write, tier", lambda: _all(write, ssd.num_writers))
    await _timed(figures, "write, file", lambda: asyncio.to_thread(_plain, large, arena, os.pwritev, ssd.num_writers))
    await _timed(figures, "write, dd", dd_write)
    await _timed(figures, "read, tier", lambda: _all(read, THREADS))
    await _timed(figures, "read, file", lambda: asyncio.to_thread(_plain, large, arena, os.preadv, THREADS))
    await _timed(figures, "read, dd", dd_read)
    ssd.remove(meta.key for meta in metas)
    await ssd.settled()
    await ssd.close()
    large.unlink()


async def _timed(figures: Figures, name: str, work: Callable[[], Awaitable[None]]) -> None:
    started = time.perf_counter()
    await work()
    seconds = time.perf_counter() - started
    figures.gb_per_s.setdefault(name, []).append(NUM_CHUNKS * CHUNK_BYTES / seconds / 1e9)


async def _all(work: Callable[[int], Awaitable[None]], at_once: int) -> None:
    left = iter(range(NUM_CHUNKS))

    async def some() -> None:
        for at in left:
            await work(at)

    await asyncio.gather(*(some() for _ in range(at_once)))


def _plain(path: Path, arena: Arena, call: Callable[[int, list[memoryview], int], int], threads: int) -> None:
    """One large file, read or written from slots by as many threads as the tier has; no checksum."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        with ThreadPoolExecutor(threads) as pool:
            moved = pool.map(lambda at: call(fd, [arena.slot(at)], at * CHUNK_BYTES), range(NUM_CHUNKS))
            assert all(count == CHUNK_BYTES for count in moved)
    finally:
        os.close(fd)


def _dd(arguments: str) -> None:
    command = ["dd", *arguments.split(), f"bs={CHUNK_BYTES}", f"count={NUM_CHUNKS}", "status=none"]
    subprocess.run(command, check=True)


async def _scan(folder: Path) -> float:
    """Files a second that a start looks at."""
    ssd = _open(folder, mmap.PAGESIZE)
    page = memoryview(mmap.mmap(-1, mmap.PAGESIZE))
    metas: Iterator[ChunkMeta] = (_meta(number, page) for number in range(NUM_SMALL))

    async def some() -> None:
        for meta in metas:
            await ssd.write(meta, None, page)

    await asyncio.gather(*(some() for _ in range(ssd.num_writers)))
    await ssd.close()
    again = _open(folder, mmap.PAGESIZE)
    started = time.perf_counter()
    found = await again.load(None)
    seconds = time.perf_counter() - started
    await again.close()
    assert len(found) == NUM_SMALL
    return NUM_SMALL / seconds


def _open(folder: Path, slot_bytes: int) -> SsdStore:
    return SsdStore(
        SsdDirectory(folder, slot_bytes),
        lambda: make_policy(PolicyName.PREFIX_AWARE, 2 * NUM_SMALL, ChunkKey),
        TierBook(Tier.SSD, _LIMIT_BYTES, {}),
        _LIMIT_BYTES,
        structlog.stdlib.get_logger("benchmarks"),
        threads=THREADS,
    )


def _meta(number: int, payload: memoryview) -> ChunkMeta:
    return ChunkMeta(
        key=ChunkKey(number.to_bytes(32, "little")),
        index=0,
        num_tokens=256,
        num_bytes=len(payload),
        checksum=checksum(payload),
        request_id=RequestId("r"),
        created_ns=1,
    )


def section(figures: Figures) -> list[str]:
    lines = [
        HEADING,
        "",
        f"{NUM_CHUNKS} chunks of {CHUNK_BYTES >> 20} MiB between an arena and this machine's (virtual) disk, "
        f"{'past the page cache' if figures.is_direct else 'through the page cache'}; medians of {ROUNDS} rounds by "
        f"turns. The tier has {THREADS} threads that read, {max(1, THREADS // 2)} that write, a file per chunk, and "
        "compares each payload's checksum as it is read. File: one large file, the same calls and threads, nothing "
        "compared. `dd`: one thread, blocks of a chunk's size.",
        "",
        "| GB/s | the tier | file | dd | of file | of dd |",
        "|---|---|---|---|---|---|",
    ]
    for what in ("write", "read"):
        tier, file, dd = (f"{what}, {name}" for name in ("tier", "file", "dd"))
        lines.append(
            f"| {what} | {figures.median(tier):.2f} | {figures.median(file):.2f} | {figures.median(dd):.2f} "
            f"| {figures.ratio(tier, file):.2f}× | {figures.ratio(tier, dd):.2f}× |"
        )
    lines += [
        "",
        f"At its start a node looks at {figures.files_per_s:,.0f} files a second (headers alone, just written, so that "
        "the kernel had their folders in memory).",
    ]
    return lines
