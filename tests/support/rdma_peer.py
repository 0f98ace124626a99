"""A peer whose arena is read over rdma: in this process, or in one of its own that can be killed.

Run as a program: `python -m support.rdma_peer <directory> <secret> <NATS url> <epoch> <windows: 0 or 1>`; prints its
NodeInfo as JSON, then lives until its input ends.
"""

import asyncio
import contextlib
import functools
import random
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec

from halfmoon.bus.endpoint import Envelope, serve
from halfmoon.bus.errors import NoResponders
from halfmoon.bus.nats import NatsBus, NatsSettings
from halfmoon.bus.protocol import Bus
from halfmoon.pool.arena import Arena, arena_path
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import LeaseId, NodeId
from halfmoon.schemas.kv_tier import Describe, NodeInfo
from halfmoon.schemas.rdma import (
    RdmaChallenge,
    RdmaConnect,
    RdmaConnected,
    RdmaDisconnect,
    RdmaGrant,
    RdmaGranted,
    RdmaHello,
)
from halfmoon.transport.protocol import ReadOutcome
from halfmoon.transport.rdma.device import open_devices
from halfmoon.transport.rdma.node import RdmaNode
from halfmoon.transport.rdma.server import RdmaServer
from halfmoon.transport.rdma.verbs import RdmaUnavailable, load_verbs
from support.pool_peer import AnyPeerProcess

NODE = NodeId("peer")
SECRET = "moon"
SLOT_BYTES = 1 << 17
NUM_SLOTS = 8
GENERATION = 7
GOOD_LEASE = LeaseId("lease-good")


@functools.cache
def no_device() -> str | None:
    """Why there is no RDMA device here; None where there is one."""
    try:
        for device in open_devices(load_verbs(), (), None):
            device.close()
    except RdmaUnavailable as error:
        return str(error)
    return None


@functools.cache
def payload(slot: int, epoch: int = 1) -> bytes:
    """What the peer holds in a slot: the same in every process."""
    return random.Random(1000 * epoch + slot).randbytes(SLOT_BYTES)


def own_arena(directory: Path) -> Arena:
    """For the reader's end."""
    return Arena.create(arena_path(directory, NodeId("reader"), 1), SLOT_BYTES, NUM_SLOTS)


class RdmaPeer:
    """An arena full of known bytes. `leases` are those that it grants; with `trusting`, it grants whatever is asked."""

    def __init__(
        self,
        directory: Path,
        *,
        secret: str = SECRET,
        epoch: int = 1,
        windows: bool = True,
        slot_bytes: int = SLOT_BYTES,
        num_slots: int = NUM_SLOTS,
        idle_s: float = 120.0,
        max_connections: int = 64,
    ) -> None:
        self.leases = {GOOD_LEASE}
        self.trusting = False
        self.arena = Arena.create(arena_path(directory, NODE, epoch), slot_bytes, num_slots)
        for slot in range(num_slots):
            content = payload(slot, epoch)
            self.arena.slot(slot)[:] = content * (slot_bytes // len(content))
            self.arena.set_generation(slot, GENERATION)
        self.devices = RdmaNode.open(self.arena, windows=windows)
        self.server = RdmaServer(
            self.devices,
            self.arena,
            NODE,
            epoch,
            self.authorize,
            secret=secret,
            idle_s=idle_s,
            max_connections=max_connections,
        )
        self.info = NodeInfo(
            node=NODE,
            epoch=epoch,
            host="host-of-the-peer",
            arena_path=str(self.arena.path),
            slot_bytes=slot_bytes,
            num_slots=num_slots,
            rdma=self.devices.offer,
        )

    def authorize(self, lease_id: LeaseId, slot: int, generation: int, end: int) -> tuple[ReadOutcome, str] | None:
        if self.trusting:
            return None
        if self.arena.generation(slot) != generation:
            return ReadOutcome.STALE, f"slot {slot} is in another generation"
        return None if lease_id in self.leases else (ReadOutcome.REFUSED, f"no lease {lease_id}")

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["RdmaPeer"]:
        sweep = asyncio.create_task(self.server.sweep())
        try:
            yield self
            assert not sweep.done()
        finally:
            sweep.cancel()
            await asyncio.gather(sweep, return_exceptions=True)
            await self.close()

    async def close(self) -> None:
        await self.server.close()
        self.devices.close()
        self.arena.close()
        self.arena.unlink()


class DirectControl:
    """The verbs, without a bus. `hold` lets a test stop one of them in its tracks."""

    def __init__(self, servers: Mapping[NodeId, RdmaServer]) -> None:
        self._servers = servers
        self.held: dict[str, asyncio.Event] = {}
        self.arrived: dict[str, asyncio.Event] = {}

    def hold(self, verb: str) -> asyncio.Event:
        """Calls of this verb wait from now on, until `release`; set when one has come to wait."""
        self.held[verb] = asyncio.Event()
        self.arrived[verb] = asyncio.Event()
        return self.arrived[verb]

    def release(self, verb: str) -> None:
        self.held.pop(verb).set()

    async def hello(self, node: NodeId, request: RdmaHello, timeout_s: float) -> RdmaChallenge:
        return await (await self._server(node, "hello")).hello(request)

    async def connect(self, node: NodeId, request: RdmaConnect, timeout_s: float) -> RdmaConnected:
        return await (await self._server(node, "connect")).connect(request)

    async def grant(self, node: NodeId, request: RdmaGrant, timeout_s: float) -> RdmaGranted:
        return await (await self._server(node, "grant")).grant(request)

    async def disconnect(self, node: NodeId, request: RdmaDisconnect, timeout_s: float) -> None:
        await (await self._server(node, "disconnect")).disconnect(request)

    async def _server(self, node: NodeId, verb: str) -> RdmaServer:
        if verb in self.held:
            self.arrived[verb].set()
            await self.held[verb].wait()
        if node not in self._servers:
            raise NoResponders(subjects.kv_tier(node))
        return self._servers[node]


class RdmaPeerProcess(AnyPeerProcess):
    """An `RdmaPeer`, whose verbs are on NATS."""

    def __init__(self, directory: Path, nats_url: str, *, epoch: int = 1, windows: bool = True) -> None:
        super().__init__("support.rdma_peer", directory, SECRET, nats_url, epoch, int(windows))


async def serve_verbs(bus: Bus, peer: RdmaPeer) -> None:
    """What a kv-tier answers to those who read it over rdma."""
    server, prefix = peer.server, subjects.kv_tier(NODE)

    async def describe(request: Describe, envelope: Envelope) -> NodeInfo:
        return peer.info

    await serve(bus, f"{prefix}.rdma_hello", RdmaHello, lambda request, _: server.hello(request))
    await serve(bus, f"{prefix}.rdma_connect", RdmaConnect, lambda request, _: server.connect(request))
    await serve(bus, f"{prefix}.rdma_grant", RdmaGrant, lambda request, _: server.grant(request))
    await serve(bus, f"{prefix}.rdma_disconnect", RdmaDisconnect, lambda request, _: server.disconnect(request))
    await serve(bus, f"{prefix}.describe", Describe, describe)


async def _main() -> None:
    directory, secret, nats_url, epoch, windows = sys.argv[1:]
    bus = await NatsBus.connect(NatsSettings(url=nats_url))
    peer = RdmaPeer(Path(directory), secret=secret, epoch=int(epoch), windows=windows == "1")
    async with peer.serving():
        await serve_verbs(bus, peer)
        sys.stdout.buffer.write(msgspec.json.encode(peer.info) + b"\n")
        sys.stdout.buffer.flush()
        await asyncio.to_thread(sys.stdin.read)
    await bus.close()


if __name__ == "__main__":
    asyncio.run(_main())
