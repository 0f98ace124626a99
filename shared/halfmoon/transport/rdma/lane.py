"""The reading end of one connection: its queue pairs, over which one read at a time goes. Blocking; used from threads.

    for each batch of slices:  READ their generations ─ all as leased? ─▶ READ the bytes ─▶ READ the generations again

A generation only ever rises, so a slot that has the leased one after the bytes were read had it while they were. The
first look spares what has gone already; the second is a READ that is begun when the bytes have arrived, since a device
may fetch two READs' memory in either order.
"""

import contextlib
import mmap
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from halfmoon.schemas.kv_tier import NodeInfo
from halfmoon.schemas.rdma import RdmaConnected, WantedQueuePair
from halfmoon.transport.protocol import ReadOutcome, SliceRead, SliceResult
from halfmoon.transport.rdma.device import Region
from halfmoon.transport.rdma.node import RdmaNode
from halfmoon.transport.rdma.operation import Operation
from halfmoon.transport.rdma.pairing import PortPair
from halfmoon.transport.rdma.queue_pair import Completion, QueuePair, QueuePairError, Status
from halfmoon.transport.rdma.server import GENERATION_BYTES, MAX_RANGES
from halfmoon.transport.rdma.verbs import RdmaUnavailable
from halfmoon.transport.slices import failed

_BATCH_SLICES = 32
"""That are read, and then looked at, together."""
_SEGMENT_BYTES = 1 << 20
"""Of one READ: small enough that several queue pairs share a slice's bytes evenly."""
_MAX_POSTED = 32
"""Outstanding READs per queue pair; the device works on up to 16 of them at once."""
_SPINS = 50
_SLEEP_S = 0.000_05
_MAX_SLEEP_S = 0.001
_DRAIN_S = 2.0


@dataclass(frozen=True, slots=True)
class Job:
    """A slice that its server has opened."""

    read: SliceRead
    key: int
    queue_pair: int


@dataclass(frozen=True, slots=True)
class _Work:
    """One READ to do."""

    job: int
    queue_pair: int
    local_address: int
    local_key: int
    num_bytes: int
    remote_address: int
    remote_key: int


class _Stopped(Exception):
    """The lane can't go on."""

    def __init__(self, detail: str, refused_job: int | None = None) -> None:
        super().__init__(detail)
        self.refused_job = refused_job


class Lane:
    """Made, then connected, then used for reads until one fails: then it has closed itself, and `failure` says why."""

    def __init__(self, devices: RdmaNode, pairs: Sequence[PortPair], peer: NodeInfo) -> None:
        """Raises `QueuePairError` and `RdmaUnavailable`."""
        self.connection = b""
        self.sequence = 0
        self.failure: str | None = None
        self._peer = peer
        self._nics = [devices.nics[pair.own] for pair in pairs]
        self._ports = [pair.theirs for pair in pairs]
        self._arena_address = 0
        self._table_keys: tuple[int, ...] = ()
        self._scratch = memoryview(mmap.mmap(-1, MAX_RANGES * GENERATION_BYTES))
        self._posted = [0] * len(pairs)
        with contextlib.ExitStack() as undo:
            self._scratches: list[Region] = []
            for nic in self._nics:
                region = nic.device.register(self._scratch)
                undo.callback(region.close)
                self._scratches.append(region)
            self._ends: list[QueuePair] = []
            for nic in self._nics:
                end = QueuePair(nic.device, max_posted=_MAX_POSTED)
                undo.callback(end.close)
                self._ends.append(end)
            undo.pop_all()

    @property
    def num_queue_pairs(self) -> int:
        return len(self._ends)

    @property
    def wanted(self) -> tuple[WantedQueuePair, ...]:
        """What the server is to connect."""
        return tuple(
            WantedQueuePair(end=end.end, device=port.device, port=port.port)
            for end, port in zip(self._ends, self._ports, strict=True)
        )

    def connect(self, connected: RdmaConnected) -> None:
        """Raises `QueuePairError`."""
        num = len(self._ends)
        if len(connected.queue_pairs) != num or len(connected.table_keys) != num:
            raise QueuePairError(f"the peer connected {len(connected.queue_pairs)} queue pairs, not {num}")
        size = self._peer.num_slots * (self._peer.slot_bytes + GENERATION_BYTES)
        if not all(0 <= key < 1 << 32 for key in connected.table_keys) or not (
            0 <= connected.arena_address < (1 << 64) - size
        ):
            raise QueuePairError("the peer's keys or addresses are out of bounds")
        for end, theirs in zip(self._ends, connected.queue_pairs, strict=True):
            end.connect(theirs, is_readable=False)
        self.connection = connected.connection
        self._arena_address = connected.arena_address
        self._table_keys = connected.table_keys

    def read(self, jobs: Sequence[Job], operation: Operation) -> list[SliceResult | None]:
        """Read what can be read; None for what was not come to, or not known to be right, before the lane failed.

        Where the operation ends first, the lane fails too. When this returns, nothing writes to any destination.
        """
        results: list[SliceResult | None] = [None] * len(jobs)
        with contextlib.ExitStack() as borrowed:
            try:
                for start in range(0, len(jobs), _BATCH_SLICES):
                    batch = range(start, min(start + _BATCH_SLICES, len(jobs)))
                    self._read_batch(jobs, batch, results, operation, borrowed)
            except _Stopped as error:
                self.failure = str(error)
                if error.refused_job is not None:
                    results[error.refused_job] = failed(ReadOutcome.REFUSED, str(error))
            except (QueuePairError, RdmaUnavailable) as error:
                self.failure = str(error)
            finally:
                # Before what was borrowed is given back: until then it may be written to.
                if self.failure is not None or any(self._posted):
                    self._stop()
        return results

    def close(self) -> None:
        """Idempotent."""
        for end in self._ends:
            end.close()
        for region in self._scratches:
            region.close()
        self._scratches = []

    def _read_batch(
        self,
        jobs: Sequence[Job],
        batch: Sequence[int],
        results: list[SliceResult | None],
        operation: Operation,
        borrowed: contextlib.ExitStack,
    ) -> None:
        live: list[int] = []
        for index, generation in zip(batch, self._generations(jobs, batch, operation), strict=True):
            if generation == jobs[index].read.generation:
                live.append(index)
            else:
                results[index] = _stale(jobs[index].read, generation, time.time_ns())
        started_ns = time.time_ns()
        self._run([work for index in live for work in self._segments(jobs[index], index, borrowed)], operation)
        finished_ns = time.time_ns()
        for index, generation in zip(live, self._generations(jobs, live, operation), strict=True):
            if generation == jobs[index].read.generation:
                results[index] = SliceResult(ReadOutcome.OK, started_ns, finished_ns)
            else:
                results[index] = _stale(jobs[index].read, generation, started_ns)

    def _generations(self, jobs: Sequence[Job], batch: Sequence[int], operation: Operation) -> list[int]:
        """Of the slots, as they are in the peer's table now."""
        table = self._arena_address + self._peer.num_slots * self._peer.slot_bytes
        works = []
        for place, index in enumerate(batch):
            end = jobs[index].queue_pair
            scratch = self._scratches[end]
            works.append(
                _Work(
                    job=index,
                    queue_pair=end,
                    local_address=scratch.address + place * GENERATION_BYTES,
                    local_key=scratch.local_key,
                    num_bytes=GENERATION_BYTES,
                    remote_address=table + jobs[index].read.slot * GENERATION_BYTES,
                    remote_key=self._table_keys[end],
                )
            )
        self._run(works, operation)
        return [
            int.from_bytes(self._scratch[place * GENERATION_BYTES : (place + 1) * GENERATION_BYTES], "little")
            for place in range(len(batch))
        ]

    def _segments(self, job: Job, index: int, borrowed: contextlib.ExitStack) -> Iterator[_Work]:
        """The READs that bring one slice."""
        num_bytes = job.read.destination.nbytes
        if num_bytes == 0:
            return
        nic, port = self._nics[job.queue_pair], self._ports[job.queue_pair]
        local = int(np.frombuffer(job.read.destination, dtype=np.uint8).ctypes.data)
        region = nic.arena
        if not region.covers(local, num_bytes):
            region = nic.device.register(job.read.destination)
            borrowed.callback(region.close)
        remote = self._arena_address + job.read.slot * self._peer.slot_bytes + job.read.offset
        step = min(_SEGMENT_BYTES, port.max_message_bytes, nic.device.port.max_message_bytes)
        for start in range(0, num_bytes, step):
            yield _Work(
                job=index,
                queue_pair=job.queue_pair,
                local_address=local + start,
                local_key=region.local_key,
                num_bytes=min(step, num_bytes - start),
                remote_address=remote + start,
                remote_key=job.key,
            )

    def _run(self, works: Sequence[_Work], operation: Operation) -> None:
        """Do all of this, with a bounded number outstanding on each queue pair. Raises `_Stopped`."""
        waiting = [deque[int]() for _ in self._ends]
        for token, work in enumerate(works):
            waiting[work.queue_pair].append(token)
        num_left, num_idle = len(works), 0
        while num_left:
            if operation.ended:
                raise _Stopped("the read was given up, or its deadline has passed")
            num_done = 0
            for index, end in enumerate(self._ends):
                while waiting[index] and self._posted[index] < end.max_posted:
                    token = waiting[index].popleft()
                    _post(end, token, works[token])
                    self._posted[index] += 1
                if self._posted[index]:
                    completions = end.poll()
                    self._posted[index] -= len(completions)
                    num_done += len(completions)
                    for done in completions:
                        self._check(done, works)
            num_left -= num_done
            num_idle = 0 if num_done else num_idle + 1
            if num_idle > _SPINS:
                time.sleep(min(_SLEEP_S * (num_idle - _SPINS), _MAX_SLEEP_S))

    def _check(self, done: Completion, works: Sequence[_Work]) -> None:
        if done.status is Status.OK:
            return
        job = works[done.token].job
        if done.status is Status.NO_ACCESS:
            raise _Stopped(f"{done.detail}: the lease has ended, or another opened on this connection", job)
        raise _Stopped(done.detail)

    def _stop(self) -> None:
        """End what is outstanding, and close: nothing is written any more."""
        limit_s = time.monotonic() + _DRAIN_S
        with contextlib.suppress(QueuePairError):  # Then destroying the queue pairs ends it.
            for end in self._ends:
                end.fail()
            while any(self._posted) and time.monotonic() < limit_s:
                for index, end in enumerate(self._ends):
                    self._posted[index] -= len(end.poll())
                time.sleep(_SLEEP_S)
        self.close()


def _post(end: QueuePair, token: int, work: _Work) -> None:
    end.post_read(token, work.local_address, work.local_key, work.num_bytes, work.remote_address, work.remote_key)


def _stale(read: SliceRead, generation: int, started_ns: int) -> SliceResult:
    detail = f"slot {read.slot} is in generation {generation}, not {read.generation}"
    return failed(ReadOutcome.STALE, detail, started_ns)
