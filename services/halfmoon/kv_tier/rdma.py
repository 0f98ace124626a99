"""RDMA of a kv-tier: its devices, and what its peers are asked over the bus."""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TypeVar

from halfmoon.bus.endpoint import call
from halfmoon.bus.protocol import Bus
from halfmoon.kv_tier.config import KvTierConfig
from halfmoon.lifecycle.runtime import StartupError
from halfmoon.pool.arena import Arena
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import NodeId
from halfmoon.schemas.kv_tier import Done
from halfmoon.schemas.rdma import (
    RdmaChallenge,
    RdmaConnect,
    RdmaConnected,
    RdmaDisconnect,
    RdmaGrant,
    RdmaGranted,
    RdmaHello,
    RdmaOffer,
)
from halfmoon.schemas.wire import Message
from halfmoon.transport.protocol import Transport
from halfmoon.transport.rdma.absent import AbsentRdma
from halfmoon.transport.rdma.node import RdmaNode
from halfmoon.transport.rdma.reader import RdmaTransport
from halfmoon.transport.rdma.server import Authorize, RdmaServer
from halfmoon.transport.rdma.verbs import RdmaUnavailable

R = TypeVar("R", bound=Message)


class BusControl:
    """Implements `RdmaControl`: the `rdma_*` verbs of other nodes' kv-tiers."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def hello(self, node: NodeId, request: RdmaHello, timeout_s: float) -> RdmaChallenge:
        return await self._ask(node, "rdma_hello", request, RdmaChallenge, timeout_s)

    async def connect(self, node: NodeId, request: RdmaConnect, timeout_s: float) -> RdmaConnected:
        return await self._ask(node, "rdma_connect", request, RdmaConnected, timeout_s)

    async def grant(self, node: NodeId, request: RdmaGrant, timeout_s: float) -> RdmaGranted:
        return await self._ask(node, "rdma_grant", request, RdmaGranted, timeout_s)

    async def disconnect(self, node: NodeId, request: RdmaDisconnect, timeout_s: float) -> None:
        await self._ask(node, "rdma_disconnect", request, Done, timeout_s)

    async def _ask(self, node: NodeId, verb: str, request: Message, reply_type: type[R], timeout_s: float) -> R:
        return await call(self._bus, f"{subjects.kv_tier(node)}.{verb}", request, reply_type, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True)
class Rdma:
    """What a node reads and is read with."""

    transport: Transport
    summary: str
    """For the log: the devices, or why there is none."""
    server: RdmaServer | None = None
    offer: RdmaOffer | None = None


async def open_rdma(
    config: KvTierConfig, arena: Arena, authorize: Authorize, epoch: int, bus: Bus, undo: contextlib.AsyncExitStack
) -> Rdma:
    """Open the devices until `undo`; what can't be had is an `AbsentRdma`. Closing the transport is the caller's.

    Raises `StartupError` where the settings insist on RDMA.
    """
    try:
        devices = await _devices(config, arena)
    except RdmaUnavailable as error:
        if config.rdma == "on":
            raise StartupError(f"rdma is `on`, and can't be used: {error}") from None
        return Rdma(AbsentRdma(str(error)), str(error))
    undo.push_async_callback(asyncio.to_thread, devices.close)
    secret = config.cluster_secret or ""
    server = RdmaServer(devices, arena, NodeId(config.node), epoch, authorize, secret=secret)
    undo.push_async_callback(server.close)
    transport = RdmaTransport(
        devices, BusControl(bus), reader=config.node, secret=secret, num_queue_pairs=config.rdma_queue_pairs
    )
    summary = ", ".join(nic.device.port.device for nic in devices.nics)
    return Rdma(transport, f"{summary}, {'with' if devices.windows else 'without'} windows", server, devices.offer)


async def _devices(config: KvTierConfig, arena: Arena) -> RdmaNode:
    if config.rdma == "off":
        raise RdmaUnavailable("it is switched off, by the setting rdma")
    if config.cluster_secret is None:
        raise RdmaUnavailable("it needs a cluster_secret: set the same one on every node")
    # Pinning the arena takes a while.
    return await asyncio.to_thread(
        RdmaNode.open,
        arena,
        names=config.rdma_devices,
        gid_index=config.rdma_gid_index,
        windows=config.rdma_windows,
    )
