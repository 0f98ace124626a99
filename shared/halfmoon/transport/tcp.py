"""The reading end of `tcp`: blocking sockets in threads of their own, received straight into the destinations."""

import asyncio
import itertools
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from halfmoon.schemas.ids import LeaseId
from halfmoon.schemas.kv_tier import NodeInfo
from halfmoon.transport import tcp_wire as wire
from halfmoon.transport.protocol import ReadOutcome, SliceRead, SliceResult
from halfmoon.transport.slices import all_failed, all_of, ended, failed, seconds_left, shares
from halfmoon.transport.tcp_connections import Connections, Operation, StalePeer, closing_on_error
from halfmoon.transport.tcp_stream import Deadline, WireError, receive_exactly, receive_into

_LANE_BYTES = 16 << 20
"""A batch is spread over several connections only where each gets this much."""
_OUTCOMES = {wire.Status.STALE: ReadOutcome.STALE, wire.Status.REFUSED: ReadOutcome.REFUSED}


class TcpTransport:
    """Reads from any peer that serves tcp and knows the secret. Connections are kept, per peer and epoch."""

    name = "tcp"

    def __init__(self, secret: str | None, *, max_lanes: int = 4, max_threads: int = 16, max_idle: int = 64) -> None:
        """A batch is spread over at most `max_lanes` connections: four are faster than one also where there are but two
        cores, and take less processor time, since each end waits less for the other.

        `max_threads` receive at once, for all reads together; what is more waits, within its deadline.
        """
        self._max_lanes = max_lanes
        self._threads = ThreadPoolExecutor(max_threads, thread_name_prefix="tcp-read")
        self._connections = Connections(None if secret is None else secret.encode(), max_idle=max_idle)
        self._operations: set[Operation] = set()
        self._closed = False

    def unavailable(self, peer: NodeInfo) -> str | None:
        if self._closed:
            return "the transport is closed"
        return f"node {peer.node} serves no tcp" if peer.tcp_address is None else None

    @property
    def num_connected(self) -> int:
        """Reads that have a connection now."""
        return sum(operation.is_connected for operation in self._operations)

    async def read(
        self, peer: NodeInfo, lease_id: LeaseId, slices: Sequence[SliceRead], *, deadline_ns: int
    ) -> list[SliceResult]:
        if (reason := self.unavailable(peer)) is not None:
            return all_failed(slices, ReadOutcome.UNREACHABLE, reason)
        operation = Operation(seconds_left(deadline_ns))
        self._operations.add(operation)
        loop = asyncio.get_running_loop()
        works = [
            loop.run_in_executor(self._threads, self._read, operation, peer, lease_id, lane)
            for lane in shares(slices, self._max_lanes, _LANE_BYTES)
        ]
        try:
            return list(itertools.chain.from_iterable(await all_of(works)))
        finally:
            if not all(work.done() for work in works):
                operation.end()
            try:
                await ended(*works)
            finally:
                self._operations.discard(operation)

    async def close(self) -> None:
        self._closed = True
        for operation in list(self._operations):
            operation.end()
        await asyncio.to_thread(self._threads.shutdown)
        self._connections.close()

    def _read(
        self, operation: Operation, peer: NodeInfo, lease_id: LeaseId, slices: Sequence[SliceRead]
    ) -> list[SliceResult]:
        """In a thread: these slices over one connection, in requests of bounded size."""
        results: list[SliceResult] = []
        outcome, detail = ReadOutcome.UNREACHABLE, ""
        try:
            operation.deadline.left()
            connection = self._connections.take(peer)
            reused = connection is not None
            while True:
                if connection is None:
                    connection = self._connections.connect(operation, peer)
                try:
                    with closing_on_error(connection), operation.using(connection):
                        for start in range(len(results), len(slices), wire.MAX_SLICES):
                            batch = slices[start : start + wire.MAX_SLICES]
                            _read_batch(connection, operation.deadline, lease_id, batch, results)
                    break
                except (WireError, ConnectionError):
                    if results or not reused:
                        raise
                # The peer had let go of this idle connection: only a fresh one tells whether the peer is there.
                self._connections.forget(peer)
                connection, reused = None, False
            self._connections.keep(connection, peer)
        except TimeoutError:
            outcome, detail = ReadOutcome.DEADLINE, f"node {peer.node} at {peer.tcp_address} did not answer in time"
        except StalePeer as error:
            outcome, detail = ReadOutcome.STALE, str(error)
        except (WireError, OSError, ValueError) as error:
            detail = f"node {peer.node} at {peer.tcp_address}: {error}"
        return results + [failed(outcome, detail) for _ in slices[len(results) :]]


@dataclass(slots=True)
class _Answer:
    """What the peer said of one slice."""

    status: wire.Status
    started_ns: int
    finished_ns: int

    def result(self, reason: str) -> SliceResult:
        outcome = ReadOutcome.OK if self.status is wire.Status.OK else _OUTCOMES[self.status]
        return SliceResult(outcome, self.started_ns, self.finished_ns, reason)


def _read_batch(
    connection: socket.socket,
    deadline: Deadline,
    lease_id: LeaseId,
    slices: Sequence[SliceRead],
    results: list[SliceResult],
) -> None:
    """Ask for these slices and take the answer; what is known of them is appended, also where it ends with an error."""
    wanted = tuple(
        wire.WireSlice(slot=each.slot, generation=each.generation, offset=each.offset, num_bytes=len(each.destination))
        for each in slices
    )
    wire.send_message(connection, wire.ReadRequest(lease_id=lease_id, slices=wanted), deadline)
    answers: list[_Answer] = []
    told: tuple[str, ...] = ()
    try:
        _receive_groups(connection, deadline, slices, answers)
        if num_failed := sum(answer.status is not wire.Status.OK for answer in answers):
            told = wire.receive_message(connection, wire.REASONS, deadline, wire.MAX_FRAME_BYTES).reasons
            if len(told) != num_failed:
                raise WireError(f"{len(told)} reasons for {num_failed} slices that could not be had")
    finally:
        reasons = iter(told)
        for answer in answers:
            is_ok = answer.status is wire.Status.OK
            results.append(answer.result("" if is_ok else next(reasons, "the peer went away before it said why")))


def _receive_groups(
    connection: socket.socket, deadline: Deadline, slices: Sequence[SliceRead], answers: list[_Answer]
) -> None:
    """Bytes go to their destinations; one call brings a group's, its second statuses and the next group's first."""
    groups = list(wire.groups([len(each.destination) for each in slices]))
    started_ns = time.time_ns()
    before = wire.statuses(receive_exactly(connection, len(groups[0]), deadline)) if groups else []
    for number, group in enumerate(groups):
        sent = [position for position, status in zip(group, before, strict=True) if status is wire.Status.OK]
        num_next = len(groups[number + 1]) if number + 1 < len(groups) else 0
        codes = bytearray(len(sent) + num_next)
        receive_into(connection, [*(slices[position].destination for position in sent), memoryview(codes)], deadline)
        finished_ns = time.time_ns()
        after = iter(wire.statuses(bytes(codes[: len(sent)])))
        answers.extend(
            _Answer(next(after) if status is wire.Status.OK else status, started_ns, finished_ns) for status in before
        )
        before = wire.statuses(bytes(codes[len(sent) :]))
        started_ns = finished_ns
