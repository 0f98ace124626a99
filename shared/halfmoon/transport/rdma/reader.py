"""The reading end of `rdma`: sets up lanes over the control plane, and reads over them in threads."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from halfmoon.bus.errors import BusError, RemoteError
from halfmoon.schemas.ids import LeaseId, NodeId
from halfmoon.schemas.kv_tier import NodeInfo
from halfmoon.schemas.rdma import (
    RdmaAccess,
    RdmaChallenge,
    RdmaConnect,
    RdmaConnected,
    RdmaDisconnect,
    RdmaGrant,
    RdmaGranted,
    RdmaHello,
    RdmaRange,
    RdmaVerdict,
)
from halfmoon.schemas.wire import ErrorCode
from halfmoon.transport.protocol import ReadOutcome, SliceRead, SliceResult
from halfmoon.transport.rdma.lane import Job, Lane
from halfmoon.transport.rdma.node import RdmaNode
from halfmoon.transport.rdma.operation import Operation
from halfmoon.transport.rdma.pairing import PortPair, pair_ports
from halfmoon.transport.rdma.proofs import is_proven, new_nonce, signed
from halfmoon.transport.rdma.queue_pair import QueuePairError
from halfmoon.transport.rdma.server import MAX_RANGES
from halfmoon.transport.rdma.verbs import RdmaUnavailable
from halfmoon.transport.slices import all_failed, ended, failed

_CONTROL_S = 5.0
"""For one question to a peer, at most."""
_VERDICTS = {RdmaVerdict.STALE: ReadOutcome.STALE, RdmaVerdict.REFUSED: ReadOutcome.REFUSED}

T = TypeVar("T")


class RdmaControl(Protocol):
    """The `rdma_*` verbs of peers, over whatever carries them. Raises `BusError`; `RemoteError` where they refuse."""

    async def hello(self, node: NodeId, request: RdmaHello, timeout_s: float) -> RdmaChallenge: ...

    async def connect(self, node: NodeId, request: RdmaConnect, timeout_s: float) -> RdmaConnected: ...

    async def grant(self, node: NodeId, request: RdmaGrant, timeout_s: float) -> RdmaGranted: ...

    async def disconnect(self, node: NodeId, request: RdmaDisconnect, timeout_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class _Idle:
    lane: Lane
    since_s: float


class _Failed(Exception):
    """What a read comes to, where it can't go on."""

    def __init__(self, outcome: ReadOutcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome


class RdmaTransport:
    """Reads from any peer that offers rdma, knows the secret, and has a port that one of ours reaches.

    Each lane carries one read at a time, over several queue pairs; idle lanes are kept, per peer and epoch.
    """

    name = "rdma"

    def __init__(
        self,
        devices: RdmaNode,
        control: RdmaControl,
        *,
        reader: str,
        secret: str,
        num_queue_pairs: int = 2,
        max_reads: int = 8,
        max_idle_per_peer: int = 4,
        idle_s: float = 60.0,
    ) -> None:
        """`reader`: this node, for the peers' logs. Lanes idle for longer than `idle_s` are let go."""
        self._devices = devices
        self._control = control
        self._reader = reader
        self._secret = secret.encode()
        self._num_queue_pairs = num_queue_pairs
        self._max_idle = max_idle_per_peer
        self._idle_s = idle_s
        self._threads = ThreadPoolExecutor(max_reads, thread_name_prefix="rdma-read")
        self._operations: dict[Operation, asyncio.Future[None]] = {}
        self._idle: dict[tuple[NodeId, int], deque[_Idle]] = {}
        self._farewells: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def unavailable(self, peer: NodeInfo) -> str | None:
        if self._is_closed:
            return "the transport is closed"
        pairs, reason = self._pairs(peer)
        return None if pairs else reason

    async def read(
        self, peer: NodeInfo, lease_id: LeaseId, slices: Sequence[SliceRead], *, deadline_ns: int
    ) -> list[SliceResult]:
        if (reason := self.unavailable(peer)) is not None:
            return all_failed(slices, ReadOutcome.UNREACHABLE, reason)
        operation = Operation(deadline_ns)
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._operations[operation] = over
        try:
            return await self._read(operation, peer, lease_id, slices)
        finally:
            del self._operations[operation]
            over.set_result(None)

    async def close(self) -> None:
        self._is_closed = True
        for operation in self._operations:
            operation.give_up()
        if running := list(self._operations.values()):
            await asyncio.wait(running)
        for (node, _), lanes in self._idle.items():
            for idle in lanes:
                self._discard(node, idle.lane)
        self._idle.clear()
        if self._farewells:
            await asyncio.wait(self._farewells)
        await asyncio.to_thread(self._threads.shutdown)

    async def _read(
        self, operation: Operation, peer: NodeInfo, lease_id: LeaseId, slices: Sequence[SliceRead]
    ) -> list[SliceResult]:
        results = [_outside(peer, each) for each in slices]
        try:
            while open_ones := [index for index, result in enumerate(results) if result is None][:MAX_RANGES]:
                lane, is_reused = await self._lane(operation, peer)
                detail = await self._read_over(lane, operation, peer, lease_id, slices, open_ones, results)
                # A lane that was idle may have died since: only a fresh one tells whether the peer is there.
                if not is_reused and all(results[index] is None for index in open_ones):
                    raise _Failed(ReadOutcome.UNREACHABLE, detail)
        except _Failed as error:
            outcome, detail = error.outcome, f"node {peer.node}: {error}"
            if operation.ended and outcome is ReadOutcome.UNREACHABLE:
                outcome, detail = ReadOutcome.DEADLINE, f"node {peer.node} was not read in time"
            return [failed(outcome, detail) if result is None else result for result in results]
        return [result for result in results if result is not None]

    async def _lane(self, operation: Operation, peer: NodeInfo) -> tuple[Lane, bool]:
        """A lane to this life of the peer, and whether it has been used before. Raises `_Failed`."""
        if operation.ended:
            raise _Failed(ReadOutcome.DEADLINE, "the deadline has passed")
        long_ago_s = time.monotonic() - self._idle_s
        for (node, epoch), lanes in list(self._idle.items()):
            while lanes and (lanes[0].since_s < long_ago_s or (node == peer.node and epoch != peer.epoch)):
                self._discard(node, lanes.popleft().lane)
            if not lanes:
                del self._idle[node, epoch]
        if lanes := self._idle.get((peer.node, peer.epoch), deque()):
            return lanes.pop().lane, True
        try:
            return await self._connect(operation, peer), False
        except RemoteError as error:
            outcome = ReadOutcome.STALE if error.error.code is ErrorCode.STALE else ReadOutcome.UNREACHABLE
            raise _Failed(outcome, error.error.message) from None
        except (BusError, QueuePairError, RdmaUnavailable) as error:
            raise _Failed(ReadOutcome.UNREACHABLE, str(error)) from None

    async def _connect(self, operation: Operation, peer: NodeInfo) -> Lane:
        pairs, reason = self._pairs(peer)
        if not pairs:
            raise RdmaUnavailable(reason)
        challenge = await self._control.hello(
            peer.node, RdmaHello(reader=self._reader), operation.seconds_left(_CONTROL_S)
        )
        lane = await self._made(peer, lambda: Lane(self._devices, pairs, peer))
        try:
            request = RdmaConnect(
                reader=self._reader,
                node=peer.node,
                epoch=peer.epoch,
                server_nonce=challenge.nonce,
                reader_nonce=new_nonce(),
                queue_pairs=lane.wanted,
            )
            connected = await self._control.connect(
                peer.node, signed(self._secret, request), operation.seconds_left(_CONTROL_S)
            )
            if not is_proven(self._secret, connected, connected.proof) or (
                connected.reader_nonce != request.reader_nonce
            ):
                raise QueuePairError("it could not prove that it knows the cluster_secret")
            await self._in_thread(lambda: lane.connect(connected))
        except BaseException:
            self._discard(peer.node, lane)
            raise
        return lane

    async def _read_over(
        self,
        lane: Lane,
        operation: Operation,
        peer: NodeInfo,
        lease_id: LeaseId,
        slices: Sequence[SliceRead],
        wanted: Sequence[int],
        results: list[SliceResult | None],
    ) -> str:
        """Read these slices over a lane, as far as it goes; where it fails, why."""
        is_kept = False
        try:
            shares = shared_out(lane.num_queue_pairs, [slices[index].destination.nbytes for index in wanted])
            access = await self._granted(lane, operation, peer, lease_id, [slices[index] for index in wanted], shares)
            jobs: list[Job] = []
            positions: list[int] = []
            for index, share, each in zip(wanted, shares, access, strict=True):
                if each.verdict is RdmaVerdict.OPEN:
                    jobs.append(Job(slices[index], each.key, share))
                    positions.append(index)
                else:
                    results[index] = failed(_VERDICTS[each.verdict], f"node {peer.node}: {each.detail}")
            for index, result in zip(positions, await self._in_lane(lane, jobs, operation), strict=True):
                results[index] = result
            is_kept = lane.failure is None
            return lane.failure or ""
        except BusError as error:
            return str(error)
        finally:
            if is_kept:
                self._keep(peer, lane)
            else:
                self._discard(peer.node, lane)

    async def _granted(
        self,
        lane: Lane,
        operation: Operation,
        peer: NodeInfo,
        lease_id: LeaseId,
        slices: Sequence[SliceRead],
        shares: Sequence[int],
    ) -> tuple[RdmaAccess, ...]:
        """Have the peer open these slots. Raises `BusError`."""
        lane.sequence += 1
        ranges = tuple(
            RdmaRange(
                slot=each.slot,
                generation=each.generation,
                end=each.offset + each.destination.nbytes,
                queue_pair=share,
            )
            for each, share in zip(slices, shares, strict=True)
        )
        request = RdmaGrant(connection=lane.connection, sequence=lane.sequence, lease_id=lease_id, ranges=ranges)
        granted = await self._control.grant(
            peer.node, signed(self._secret, request), operation.seconds_left(_CONTROL_S)
        )
        answers = (granted.connection, granted.sequence, len(granted.access))
        if answers != (lane.connection, lane.sequence, len(slices)) or not all(
            0 <= each.key < 1 << 32 for each in granted.access
        ):
            raise BusError("the answer to a grant isn't one to the question")
        if not is_proven(self._secret, granted, granted.proof):
            raise BusError("it could not prove that it knows the cluster_secret")
        return granted.access

    async def _in_lane(self, lane: Lane, jobs: Sequence[Job], operation: Operation) -> list[SliceResult | None]:
        """In a thread: it is done with all destinations when this returns or raises."""
        work = asyncio.wrap_future(self._threads.submit(lane.read, jobs, operation))
        try:
            return await asyncio.shield(work)
        finally:
            if not work.done():
                operation.give_up()
            await ended(work)

    async def _made(self, peer: NodeInfo, make: Callable[[], Lane]) -> Lane:
        """A new lane, that isn't lost where we are cancelled while a thread makes it."""
        making = asyncio.wrap_future(self._threads.submit(make))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(lambda made: self._discard_made(peer.node, made))
            raise

    def _discard_made(self, node: NodeId, made: asyncio.Future[Lane]) -> None:
        if not made.cancelled() and made.exception() is None:
            self._discard(node, made.result())

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _pairs(self, peer: NodeInfo) -> tuple[list[PortPair], str]:
        if peer.rdma is None:
            return [], f"node {peer.node} offers no rdma"
        return pair_ports(
            [nic.device.port for nic in self._devices.nics],
            peer.rdma.ports,
            numa_node=self._devices.numa_node,
            num_queue_pairs=self._num_queue_pairs,
        )

    def _keep(self, peer: NodeInfo, lane: Lane) -> None:
        idle = self._idle.setdefault((peer.node, peer.epoch), deque())
        if self._is_closed or len(idle) >= self._max_idle:
            self._discard(peer.node, lane)
        else:
            idle.append(_Idle(lane, time.monotonic()))

    def _discard(self, node: NodeId, lane: Lane) -> None:
        """Close a lane that nothing is outstanding on, and tell its peer, in a task that `close` waits for."""
        self._own(self._farewell(node, lane))

    def _own(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    async def _farewell(self, node: NodeId, lane: Lane) -> None:
        await self._in_thread(lane.close)
        if lane.connection:
            request = signed(self._secret, RdmaDisconnect(connection=lane.connection))
            with contextlib.suppress(BusError):  # It drops readers that it doesn't hear of by itself.
                await self._control.disconnect(node, request, _CONTROL_S)


def _outside(peer: NodeInfo, read: SliceRead) -> SliceResult | None:
    """The refusal of a range that is outside a slot; None for one that is inside."""
    end = read.offset + read.destination.nbytes
    if 0 <= read.slot < peer.num_slots and read.offset >= 0 and end <= peer.slot_bytes:
        return None
    detail = f"slot {read.slot}, bytes [{read.offset}, {end}): node {peer.node} has no such place"
    return failed(ReadOutcome.REFUSED, detail)


def shared_out(num_shares: int, sizes: Sequence[int]) -> list[int]:
    """For each size a share, so that all shares have about as many bytes: the next goes where least is."""
    totals = [0] * num_shares
    shares: list[int] = []
    for size in sizes:
        share = totals.index(min(totals))
        totals[share] += size
        shares.append(share)
    return shares
