"""How fast chunks move between two processes: `make bench ARGS=transports`; about three minutes.

The peer is a process of its own; chunks are read into another arena, page-aligned and touched, as a kv-tier does. All
that is compared takes turns, round by round, so that whatever else the machine does meets all alike.
"""

import asyncio
import contextlib
import functools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from os import cpu_count
from pathlib import Path

from benchmarks import transport_rivals as rivals
from benchmarks.transport_peer import HOST, LEASE, SECRET, Peer, running_peer
from benchmarks.transport_rivals import Sample, Skipped
from halfmoon.chunks.checksum import checksum
from halfmoon.pool.arena import Arena
from halfmoon.transport.protocol import ReadOutcome, SliceRead, Transport
from halfmoon.transport.shm import ShmTransport
from halfmoon.transport.slices import share_interpreter
from halfmoon.transport.tcp import TcpTransport

SHM = Path("/dev/shm")
CACHE = Path.home() / ".cache" / "halfmoon" / "benchmarks"
ROUNDS = 7
READERS = (1, 4, 16)
LANES = (1, 2, 4)
SIZES = ((4 << 20, 64), (12 << 20, 20))
"""Slice bytes, slices."""
SMALL_BYTES = 4096
BATCH_SLICES = 64
SMALL_ROUNDS = 300
_BUSY_S = 0.0002
"""How long each callback of the busy event loop computes."""
_DEADLINE_NS = 60_000_000_000


@dataclass(frozen=True, slots=True)
class Speed:
    rounds: tuple[float, ...]
    """GB/s of each."""
    cpu_s_per_gb: float
    """Mean."""

    @property
    def gb_per_s(self) -> float:
        """Median."""
        return statistics.median(self.rounds)

    def of(self, other: "Speed") -> float:
        """Median of the ratios within each round: what disturbed a round disturbed both."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.rounds, other.rounds, strict=True))


@dataclass(slots=True)
class Figures:
    speeds: dict[int, dict[str, Speed]] = field(default_factory=dict)
    """By slice size, then by what was measured."""
    latencies_us: dict[str, float] = field(default_factory=dict)
    """p50, by transport: one slice of 4 KiB, and `… batch`: 64 of them."""
    skipped: dict[str, str] = field(default_factory=dict)


Pass = Callable[[], Awaitable[Sample]]


class Bench:
    """One slice size: two arenas, and a pass for each way to fill one from the other."""

    def __init__(self, peer: Peer, own: Arena, theirs: Arena) -> None:
        self._peer = peer
        # Every other slot comes from the other end of the arena: neighbours would be the lucky case.
        order = [slot // 2 if slot % 2 == 0 else own.num_slots - 1 - slot // 2 for slot in range(own.num_slots)]
        self._destinations = [own.slot(slot) for slot in range(own.num_slots)]
        self._sources = [theirs.slot(slot) for slot in order]
        self.slices = [SliceRead(slot, 0, 0, own.slot(number)) for number, slot in enumerate(order)]

    async def read(self, transport: Transport, num_readers: int, *, verify: bool = False) -> Sample:
        """The whole arena, shared out to so many reads at once."""

        async def one(batch: list[SliceRead]) -> None:
            results = await transport.read(self._peer.info, LEASE, batch, deadline_ns=time.time_ns() + _DEADLINE_NS)
            if any(result.outcome is not ReadOutcome.OK for result in results):
                raise RuntimeError(f"a read failed: {results}")
            if verify:
                for each in batch:
                    await asyncio.to_thread(checksum, each.destination)

        cpu_s, started = self._cpu_s(), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for reader in range(num_readers):
                group.create_task(one(self.slices[reader::num_readers]))
        wall_s = time.perf_counter() - started
        return Sample(sum(len(each.destination) for each in self.slices), wall_s, self._cpu_s() - cpu_s)

    async def read_busy(self, transport: Transport, num_readers: int) -> Sample:
        """The same while the event loop computes all the time. Its own computing isn't counted as the read's."""
        async with _busy_loop():
            sample = await self.read(transport, num_readers)
        return Sample(sample.num_bytes, sample.wall_s, 0.0)

    async def memcpy(self, threads: ThreadPoolExecutor | None = None) -> Sample:
        return rivals.memcpy(self._destinations, self._sources, threads)

    def _cpu_s(self) -> float:
        return time.process_time() + self._peer.cpu_s()


@contextlib.asynccontextmanager
async def _busy_loop() -> AsyncIterator[None]:
    """Callbacks that compute, one after the other, without a pause."""

    async def compute() -> None:
        while True:
            until = time.perf_counter() + _BUSY_S
            while time.perf_counter() < until:
                pass
            await asyncio.sleep(0)

    task = asyncio.create_task(compute())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _rounds(passes: dict[str, Pass], rounds: int) -> dict[str, Speed]:
    """All passes by turns; the first round warms up and isn't counted."""
    samples: dict[str, list[Sample]] = {name: [] for name in passes}
    for number in range(rounds + 1):
        for name, one in passes.items():
            sample = await one()
            if number:
                samples[name].append(sample)
    return {
        name: Speed(
            tuple(each.num_bytes / each.wall_s / 1e9 for each in found),
            sum(each.cpu_s for each in found) / sum(each.num_bytes for each in found) * 1e9,
        )
        for name, found in samples.items()
    }


async def _latencies(transport: Transport, peer: Peer, own: Arena) -> dict[str, float]:
    """p50 in microseconds: of one small slice, and of a batch of them."""
    slices = [SliceRead(slot, 0, 0, own.slot(slot, SMALL_BYTES)) for slot in range(BATCH_SLICES)]
    found = {}
    for name, batch in ((transport.name, slices[:1]), (f"{transport.name} batch", slices)):
        times = []
        for _ in range(SMALL_ROUNDS):
            started = time.perf_counter()
            await transport.read(peer.info, LEASE, batch, deadline_ns=time.time_ns() + _DEADLINE_NS)
            times.append(time.perf_counter() - started)
        found[name] = statistics.median(times) * 1e6
    return found


async def _measure(figures: Figures, slice_bytes: int, num_slices: int, rounds: int) -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=SHM)))
        peer = stack.enter_context(running_peer(folder, slice_bytes, num_slices))
        own = Arena.create(folder / "own", slice_bytes, num_slices)
        theirs = Arena.attach(Path(peer.info.arena_path), slice_bytes, num_slices, writable=False)
        theirs.touch()
        bench = Bench(peer, own, theirs)
        cores = stack.enter_context(ThreadPoolExecutor(cpu_count() or 1))
        shm, tcp = ShmTransport(HOST), TcpTransport(SECRET)
        lanes = {number: TcpTransport(SECRET, max_lanes=number) for number in LANES}
        passes: dict[str, Pass] = {"memcpy": bench.memcpy, "memcpy, all cores": functools.partial(bench.memcpy, cores)}
        transports: tuple[Transport, ...] = (shm, tcp)
        for transport in transports:
            for readers in READERS:
                passes[f"{transport.name} {readers}"] = functools.partial(bench.read, transport, readers)
                passes[f"{transport.name} {readers} busy"] = functools.partial(bench.read_busy, transport, readers)
            passes[f"{transport.name} verified"] = functools.partial(bench.read, transport, 1, verify=True)
        for number, wide in lanes.items():
            passes[f"tcp {number} lanes"] = functools.partial(bench.read, wide, 1)
        if slice_bytes == SIZES[0][0]:
            _add_rivals(figures, passes, stack, slice_bytes, num_slices)
        figures.speeds[slice_bytes] = await _rounds(passes, rounds)
        if slice_bytes == SIZES[0][0]:
            for transport in transports:
                figures.latencies_us |= await _latencies(transport, peer, own)
        for used in (*transports, *lanes.values()):
            await used.close()
        own.close()
        theirs.close()


def _add_rivals(
    figures: Figures, passes: dict[str, Pass], stack: contextlib.ExitStack, slice_bytes: int, num_slices: int
) -> None:
    try:
        port = stack.enter_context(rivals.iperf3_server())
    except Skipped as skipped:
        figures.skipped["iperf3"] = str(skipped)
    else:
        for readers in READERS:
            passes[f"iperf3 {readers}"] = _in_thread(functools.partial(rivals.iperf3, port, readers))
    try:
        engine = stack.enter_context(rivals.mooncake(CACHE, slice_bytes, num_slices))
    except Skipped as skipped:
        figures.skipped["mooncake"] = str(skipped)
    else:
        passes["mooncake"] = _in_thread(engine.read)


def _in_thread(work: Callable[[], Sample]) -> Pass:
    return lambda: asyncio.to_thread(work)


def run(rounds: int = ROUNDS) -> Figures:
    """All of it, side by side."""
    share_interpreter()
    CACHE.mkdir(parents=True, exist_ok=True)
    figures = Figures()
    for slice_bytes, num_slices in SIZES:
        asyncio.run(_measure(figures, slice_bytes, num_slices, rounds))
    return figures
