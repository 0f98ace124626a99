"""The serving end: makes queue pairs for readers that know the secret, and opens to each what its leases cover.

The bytes are then read without this process hearing of it. So the leases are looked at twice: when a slot is opened,
and again and again until it is closed, which happens when its lease ends, when the reader asks for others, and when it
goes. Closing takes back the memory windows; where the devices have none, the key that the reader has goes on working
until its queue pairs are gone, and only the reader's own look at the generations tells it that a slot has changed.
"""

import asyncio
import contextlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from halfmoon.bus.errors import RemoteError
from halfmoon.pool.arena import Arena
from halfmoon.schemas.ids import LeaseId, NodeId
from halfmoon.schemas.kv_tier import Done
from halfmoon.schemas.rdma import (
    QueuePairEnd,
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
from halfmoon.schemas.wire import Error, ErrorCode, Message
from halfmoon.transport.protocol import ReadOutcome
from halfmoon.transport.rdma.node import Nic, RdmaNode
from halfmoon.transport.rdma.proofs import NONCE_BYTES, is_proven, new_nonce, signed
from halfmoon.transport.rdma.queue_pair import QueuePair, QueuePairError, Window

Authorize = Callable[[LeaseId, int, int, int], tuple[ReadOutcome, str] | None]
"""`(lease, slot, generation, end of the range in the slot)` → why it may not be read now, or None. For any thread."""

MAX_RANGES = 256
"""Of one grant."""
MAX_QUEUE_PAIRS = 16
"""Of one connection."""
GENERATION_BYTES = 8
"""Of one entry of the table of generations: a little-endian number (see `halfmoon.pool.tables`)."""
_MAX_NONCES = 256
_NONCE_S = 10.0
_SWEEP_S = 0.05
_VERDICTS = {ReadOutcome.STALE: RdmaVerdict.STALE}

T = TypeVar("T")


@dataclass(slots=True)
class _Opened:
    """A slot that is open to a connection."""

    lease_id: LeaseId
    wanted: RdmaRange
    window: Window | None


@dataclass(slots=True)
class _Connection:
    reader: str
    ends: list[tuple[QueuePair, Nic]]
    table_windows: list[Window]
    heard_s: float
    opened: list[_Opened] = field(default_factory=list)
    sequence: int = 0

    def close_slots(self, slots: Sequence[_Opened]) -> None:
        for each in slots:
            self.opened.remove(each)
            if each.window is not None:
                each.window.close()

    def close(self) -> None:
        """Nobody reads over it any more."""
        self.close_slots(list(self.opened))
        for window in self.table_windows:
            window.close()
        for end, _ in self.ends:
            end.close()


class RdmaServer:
    """Answers the `rdma_*` verbs of one node. All it does with its devices it does in one thread of its own.

    Handlers raise `RemoteError` to refuse. `sweep` is to run from the start until `close`.
    """

    def __init__(
        self,
        devices: RdmaNode,
        arena: Arena,
        node: NodeId,
        epoch: int,
        authorize: Authorize,
        *,
        secret: str,
        max_connections: int = 64,
        idle_s: float = 120.0,
    ) -> None:
        """A reader that isn't heard of for `idle_s` is taken for gone, and so is the one that was silent for longest
        where there are `max_connections` and another wants in: it connects again when it needs to."""
        self._devices = devices
        self._arena = arena
        self._node = node
        self._epoch = epoch
        self._authorize = authorize
        self._secret = secret.encode()
        self._max_connections = max_connections
        self._idle_s = idle_s
        self._nonces: OrderedDict[bytes, float] = OrderedDict()
        self._connections: OrderedDict[bytes, _Connection] = OrderedDict()
        """The one that was silent for longest first."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rdma-serve")
        self._is_closed = False
        self.bytes_granted = 0

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    @property
    def num_open_slots(self) -> int:
        return sum(len(each.opened) for each in list(self._connections.values()))

    async def hello(self, request: RdmaHello) -> RdmaChallenge:
        now_s = time.monotonic()
        while self._nonces and (len(self._nonces) >= _MAX_NONCES or next(iter(self._nonces.values())) < now_s):
            self._nonces.popitem(last=False)
        nonce = new_nonce()
        self._nonces[nonce] = now_s + _NONCE_S
        return RdmaChallenge(node=self._node, epoch=self._epoch, nonce=nonce)

    async def connect(self, request: RdmaConnect) -> RdmaConnected:
        if (request.node, request.epoch) != (self._node, self._epoch):
            raise _refusal(
                ErrorCode.STALE,
                f"node {self._node} in epoch {self._epoch} answers where {request.node} in {request.epoch} was wanted",
            )
        expires_s = self._nonces.pop(request.server_nonce, None)
        self._check_proof(request, request.proof)
        if expires_s is None or expires_s < time.monotonic() or len(request.reader_nonce) < NONCE_BYTES:
            raise _refusal(ErrorCode.INVALID_REQUEST, "the nonce isn't one of those that were given out just now")
        if not 0 < len(request.queue_pairs) <= MAX_QUEUE_PAIRS:
            raise _refusal(ErrorCode.INVALID_REQUEST, f"a connection has 1 to {MAX_QUEUE_PAIRS} queue pairs")
        return await self._in_thread(lambda: self._connect(request))

    async def grant(self, request: RdmaGrant) -> RdmaGranted:
        self._check_proof(request, request.proof)
        if len(request.ranges) > MAX_RANGES:
            raise _refusal(ErrorCode.INVALID_REQUEST, f"{len(request.ranges)} ranges, where {MAX_RANGES} are the most")
        return await self._in_thread(lambda: self._grant(request))

    async def disconnect(self, request: RdmaDisconnect) -> Done:
        self._check_proof(request, request.proof)
        await self._in_thread(lambda: self._drop(request.connection))
        return Done()

    async def sweep(self) -> None:
        """Close what leases cover no more, and drop readers that are gone."""
        while True:
            await self._in_thread(self._sweep)
            await asyncio.sleep(_SWEEP_S)

    async def close(self) -> None:
        """End every connection: when it returns, nobody reads over them. Idempotent."""
        if not self._is_closed:
            await self._in_thread(self._drop_all)
            self._is_closed = True
            self._thread.shutdown()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._is_closed:
            raise _refusal(ErrorCode.UNAVAILABLE, f"node {self._node} serves no rdma any more")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _connect(self, request: RdmaConnect) -> RdmaConnected:
        nics = {(nic.device.port.device, nic.device.port.port): nic for nic in self._devices.nics}
        while len(self._connections) >= self._max_connections:
            self._drop(next(iter(self._connections)))
        with contextlib.ExitStack() as undo:
            connection = _Connection(request.reader, [], [], time.monotonic())
            undo.callback(connection.close)
            for wanted in request.queue_pairs:
                nic = nics.get((wanted.device, wanted.port))
                if nic is None:
                    raise _refusal(ErrorCode.INVALID_REQUEST, f"there is no device {wanted.device}:{wanted.port} here")
                try:
                    self._add_end(connection, nic, wanted.end)
                except QueuePairError as error:
                    raise _refusal(ErrorCode.UNAVAILABLE, str(error)) from None
            undo.pop_all()
        name = secrets.token_bytes(16)
        self._connections[name] = connection
        windows = connection.table_windows
        return signed(
            self._secret,
            RdmaConnected(
                connection=name,
                reader_nonce=request.reader_nonce,
                queue_pairs=tuple(end.end for end, _ in connection.ends),
                arena_address=connection.ends[0][1].arena.address,
                table_keys=tuple(window.key for window in windows)
                if windows
                else tuple(nic.arena.remote_key for _, nic in connection.ends),
            ),
        )

    def _add_end(self, connection: _Connection, nic: Nic, peer: QueuePairEnd) -> None:
        end = QueuePair(nic.device, max_posted=MAX_RANGES)
        connection.ends.append((end, nic))
        end.connect(peer, is_readable=True)
        if self._devices.windows:
            start = nic.arena.address + self._arena.slot_bytes * self._arena.num_slots
            generations = (start, self._arena.num_slots * GENERATION_BYTES)
            connection.table_windows += end.open_windows(nic.arena, [generations])

    def _grant(self, request: RdmaGrant) -> RdmaGranted:
        connection = self._connections.get(request.connection)
        if connection is None:
            raise _refusal(ErrorCode.STALE, "no such connection here: it was dropped, so connect again")
        if request.sequence <= connection.sequence:
            raise _refusal(ErrorCode.INVALID_REQUEST, f"grant {request.sequence} after {connection.sequence}")
        connection.sequence = request.sequence
        connection.heard_s = time.monotonic()
        self._connections.move_to_end(request.connection)
        connection.close_slots(list(connection.opened))
        refusals = [self._refusal(request.lease_id, each, len(connection.ends)) for each in request.ranges]
        try:
            keys = self._open(connection, request, [refusal is None for refusal in refusals])
        except QueuePairError as error:
            self._drop(request.connection)
            raise _refusal(ErrorCode.UNAVAILABLE, str(error)) from None
        access = [
            RdmaAccess(verdict=RdmaVerdict.OPEN, key=key) if refusal is None else refusal
            for key, refusal in zip(keys, refusals, strict=True)
        ]
        return signed(
            self._secret,
            RdmaGranted(connection=request.connection, sequence=request.sequence, access=tuple(access)),
        )

    def _open(self, connection: _Connection, request: RdmaGrant, is_allowed: Sequence[bool]) -> list[int]:
        """Keys of the ranges that are allowed, 0 for the others."""
        keys = [0] * len(request.ranges)
        for index, (end, nic) in enumerate(connection.ends):
            positions = [
                position
                for position, each in enumerate(request.ranges)
                if is_allowed[position] and each.queue_pair == index and each.end > 0
            ]
            wanted = [request.ranges[position] for position in positions]
            windows: list[Window] | list[None] = [None] * len(wanted)
            if self._devices.windows:
                starts = [nic.arena.address + each.slot * self._arena.slot_bytes for each in wanted]
                windows = end.open_windows(
                    nic.arena, [(start, each.end) for start, each in zip(starts, wanted, strict=True)]
                )
            for position, each, window in zip(positions, wanted, windows, strict=True):
                connection.opened.append(_Opened(request.lease_id, each, window))
                keys[position] = nic.arena.remote_key if window is None else window.key
                self.bytes_granted += each.end
        return keys

    def _refusal(self, lease_id: LeaseId, wanted: RdmaRange, num_ends: int) -> RdmaAccess | None:
        if not 0 <= wanted.slot < self._arena.num_slots or not 0 <= wanted.end <= self._arena.slot_bytes:
            detail = f"slot {wanted.slot} up to byte {wanted.end}: no such place"
            return RdmaAccess(verdict=RdmaVerdict.REFUSED, detail=detail)
        if not 0 <= wanted.queue_pair < num_ends:
            detail = f"queue pair {wanted.queue_pair} of a connection of {num_ends}"
            return RdmaAccess(verdict=RdmaVerdict.REFUSED, detail=detail)
        refusal = self._authorize(lease_id, wanted.slot, wanted.generation, wanted.end)
        if refusal is None:
            return None
        return RdmaAccess(verdict=_VERDICTS.get(refusal[0], RdmaVerdict.REFUSED), detail=refusal[1])

    def _sweep(self) -> None:
        long_ago_s = time.monotonic() - self._idle_s
        for name, connection in list(self._connections.items()):
            if connection.heard_s < long_ago_s:
                self._drop(name)
                continue
            gone = [
                opened
                for opened in connection.opened
                if self._refusal(opened.lease_id, opened.wanted, len(connection.ends)) is not None
            ]
            connection.close_slots(gone)

    def _drop(self, name: bytes) -> None:
        if (connection := self._connections.pop(name, None)) is not None:
            connection.close()

    def _drop_all(self) -> None:
        for name in list(self._connections):
            self._drop(name)

    def _check_proof(self, message: Message, proof: bytes) -> None:
        if not is_proven(self._secret, message, proof):
            raise _refusal(ErrorCode.INVALID_REQUEST, "the cluster_secret doesn't match this node's")


def _refusal(code: ErrorCode, message: str) -> RemoteError:
    return RemoteError(Error(code=code, message=message))
