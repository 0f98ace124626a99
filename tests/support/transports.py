"""The ways to read another node's memory, as the contract of transports sees them: one `Ground` for each.

A ground brings up peers and readers, and can let a read stall in the middle of a slice. One for a transport that needs
a device says why it is missing.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import pytest

from halfmoon.schemas.ids import LeaseId, NodeId
from halfmoon.schemas.kv_tier import NodeInfo
from halfmoon.transport import shm
from halfmoon.transport.protocol import SliceRead, Transport
from halfmoon.transport.rdma.node import RdmaNode
from halfmoon.transport.rdma.reader import RdmaTransport
from halfmoon.transport.rdma.server import RdmaServer
from halfmoon.transport.shm import ShmTransport
from halfmoon.transport.tcp import TcpTransport
from support import pool_peer, rdma_peer
from support.cut import Proxy
from support.pool_peer import GENERATION, HOST, Peer
from support.wait import until

SECRET = "moon"
_PROXY_HOST = "127.0.0.2"


class Served(Protocol):
    """A peer that serves an arena full of known bytes, `payload(slot, epoch)`, in generation `GENERATION`."""

    @property
    def info(self) -> NodeInfo: ...

    def end_lease(self, lease_id: LeaseId) -> None:
        """From now on this lease is over."""
        ...

    def overwrite(self, slot: int) -> None:
        """Free the slot, and fill it with something else."""
        ...


class Stall(Protocol):
    """A read that is held in the middle of its first slice."""

    async def arrived(self) -> None:
        """Returns when the read has stalled."""
        ...

    def release(self) -> None: ...


class Ground(Protocol):
    name: str
    slot_bytes: int
    num_slots: int
    can_abandon: bool
    """Whether a read that stalls can be given up; a copy within one memory can only be waited for."""

    def missing(self) -> str | None:
        """Why it can't be had here."""
        ...

    def payload(self, slot: int, epoch: int = 1) -> bytes: ...

    def transport(self) -> contextlib.AbstractAsyncContextManager[Transport]: ...

    def peer(
        self, directory: Path, *, epoch: int = 1, port: int = 0
    ) -> contextlib.AbstractAsyncContextManager[Served]: ...

    def stalling(
        self, served: Served, num_bytes: int, monkeypatch: pytest.MonkeyPatch
    ) -> contextlib.AbstractAsyncContextManager[tuple[NodeInfo, Stall]]:
        """Another description of the peer, under which reads stall once `num_bytes` of a slice have come."""
        ...


@dataclass
class _ServedPeer:
    peer: Peer

    @property
    def info(self) -> NodeInfo:
        return self.peer.info

    def end_lease(self, lease_id: LeaseId) -> None:
        self.peer.arena.tables.set_lease(lease_id, None)

    def overwrite(self, slot: int) -> None:
        self.peer.arena.tables.set_readable_bytes(slot, 0)
        self.peer.arena.tables.set_generation(slot, GENERATION + 1)
        self.peer.arena.slot(slot)[:] = bytes([0xEE]) * pool_peer.SLOT_BYTES


class _LocalGround:
    """What shm and tcp share: `support.pool_peer`."""

    slot_bytes = pool_peer.SLOT_BYTES
    num_slots = pool_peer.NUM_SLOTS

    def missing(self) -> str | None:
        return None

    def payload(self, slot: int, epoch: int = 1) -> bytes:
        return pool_peer.payload(slot, epoch)

    @contextlib.asynccontextmanager
    async def peer(self, directory: Path, *, epoch: int = 1, port: int = 0) -> AsyncIterator[Served]:
        made = Peer(directory, SECRET, epoch=epoch, port=port)
        try:
            yield _ServedPeer(made)
        finally:
            await asyncio.to_thread(made.close)


class _HeldCopy:
    """Stands in for the copy of a slice: does half of it, waits, and does the rest."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._arrived = threading.Event()
        self._released = threading.Event()

    def copy(self, destination: memoryview, source: memoryview) -> None:
        to, by = np.frombuffer(destination, np.uint8), np.frombuffer(source, np.uint8)
        to[: self._num_bytes] = by[: self._num_bytes]
        self._arrived.set()
        if not self._released.wait(30):
            raise AssertionError("nobody released the copy")
        to[self._num_bytes :] = by[self._num_bytes :]

    async def arrived(self) -> None:
        await until(self._arrived.is_set, what="the copy is under way")

    def release(self) -> None:
        self._released.set()


class ShmGround(_LocalGround):
    name = "shm"
    can_abandon = False

    @contextlib.asynccontextmanager
    async def transport(self) -> AsyncIterator[Transport]:
        made = ShmTransport(HOST)
        yield made
        await made.close()

    @contextlib.asynccontextmanager
    async def stalling(
        self, served: Served, num_bytes: int, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[tuple[NodeInfo, Stall]]:
        held = _HeldCopy(num_bytes)
        monkeypatch.setattr(shm, "copy", held.copy)
        try:
            yield served.info, held
        finally:
            held.release()


class _HeldProxy:
    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    async def arrived(self) -> None:
        await until(lambda: self._proxy.is_cut, what="the read has stalled")

    def release(self) -> None:
        self._proxy.mend()


class TcpGround(_LocalGround):
    name = "tcp"
    can_abandon = True

    @contextlib.asynccontextmanager
    async def transport(self) -> AsyncIterator[Transport]:
        made = TcpTransport(SECRET)
        yield made
        await made.close()

    @contextlib.asynccontextmanager
    async def stalling(
        self, served: Served, num_bytes: int, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[tuple[NodeInfo, Stall]]:
        _, _, port = (served.info.tcp_address or "").rpartition(":")
        async with Proxy(_PROXY_HOST, "127.0.0.1", int(port)) as proxy:
            proxy.cut_after(num_bytes, drop=False)
            yield msgspec.structs.replace(served.info, tcp_address=f"{_PROXY_HOST}:{port}"), _HeldProxy(proxy)
            proxy.mend()


@dataclass
class _ServedOverRdma:
    peer: "rdma_peer.RdmaPeer"

    @property
    def info(self) -> NodeInfo:
        return self.peer.info

    def end_lease(self, lease_id: LeaseId) -> None:
        self.peer.leases.discard(lease_id)

    def overwrite(self, slot: int) -> None:
        self.peer.arena.set_generation(slot, GENERATION + 1)
        self.peer.arena.slot(slot)[:] = bytes([0xEE]) * rdma_peer.SLOT_BYTES


class RdmaGround:
    """Needs a device. How its reads stall is tested where there is one, by tests of its own."""

    name = "rdma"
    can_abandon = True
    slot_bytes = rdma_peer.SLOT_BYTES
    num_slots = rdma_peer.NUM_SLOTS

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._servers: dict[NodeId, RdmaServer] = {}

    def missing(self) -> str | None:
        return rdma_peer.no_device()

    def payload(self, slot: int, epoch: int = 1) -> bytes:
        return rdma_peer.payload(slot, epoch)

    @contextlib.asynccontextmanager
    async def transport(self) -> AsyncIterator[Transport]:
        arena = rdma_peer.own_arena(self._directory)
        devices = RdmaNode.open(arena)
        made = RdmaTransport(devices, rdma_peer.DirectControl(self._servers), reader="reader", secret=SECRET)
        yield made
        await made.close()
        devices.close()
        arena.close()
        arena.unlink()

    @contextlib.asynccontextmanager
    async def peer(self, directory: Path, *, epoch: int = 1, port: int = 0) -> AsyncIterator[Served]:
        async with rdma_peer.RdmaPeer(directory, epoch=epoch).serving() as made:
            self._servers[rdma_peer.NODE] = made.server
            try:
                yield _ServedOverRdma(made)
            finally:
                del self._servers[rdma_peer.NODE]

    def stalling(
        self, served: Served, num_bytes: int, monkeypatch: pytest.MonkeyPatch
    ) -> contextlib.AbstractAsyncContextManager[tuple[NodeInfo, Stall]]:
        pytest.skip("how reads over rdma stall is tested in tests/rdma")


def ground_of(name: str, directory: Path) -> Ground:
    """Whether it can be had here or not."""
    made: dict[str, Ground] = {"shm": ShmGround(), "tcp": TcpGround(), "rdma": RdmaGround(directory)}
    return made[name]


def in_seconds(seconds: float) -> int:
    """Unix time in nanoseconds."""
    return time.time_ns() + int(seconds * 1e9)


def whole(ground: Ground, slot: int, generation: int = GENERATION) -> tuple[SliceRead, bytearray]:
    """A read of a whole slot, and where its bytes go."""
    buffer = bytearray(ground.slot_bytes)
    return SliceRead(slot, generation, 0, memoryview(buffer)), buffer
