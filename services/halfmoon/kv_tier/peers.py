"""Other nodes' kv-tiers, over the bus."""

import time
from typing import Protocol

from halfmoon.bus.endpoint import announce, call
from halfmoon.bus.protocol import Bus
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import LeaseId, NodeId
from halfmoon.schemas.kv_tier import (
    Acquire,
    Acquired,
    ChunkSource,
    Commit,
    Committed,
    Describe,
    Done,
    NodeInfo,
    Release,
    Renew,
    Renewed,
    Report,
    Reserve,
    Reserved,
    WrittenChunk,
)
from halfmoon.tracing import Context, attached


class Peers(Protocol):
    """What is asked of other nodes' kv-tiers. Raises `BusError`."""

    async def describe(self, source: ChunkSource, deadline_ns: int) -> NodeInfo: ...

    async def acquire(self, node: NodeId, request: Acquire, deadline_ns: int, context: Context) -> Acquired: ...

    async def renew(self, node: NodeId, request: Renew, timeout_s: float) -> Renewed: ...

    async def release(self, node: NodeId, lease_id: LeaseId, timeout_s: float) -> None: ...

    async def report(self, node: NodeId, report: Report) -> None: ...


class BusPeers:
    """Implements `Peers`. A node is described once per epoch."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._known: dict[NodeId, NodeInfo] = {}

    async def describe(self, source: ChunkSource, deadline_ns: int) -> NodeInfo:
        """How to reach the source's memory; its epoch may be another than the one that was asked about."""
        known = self._known.get(source.node)
        if known is None or known.epoch != source.epoch:
            known = await self.ask(source.node, _seconds_until(deadline_ns))
            self._known[source.node] = known
        return known

    async def ask(self, node: NodeId, timeout_s: float) -> NodeInfo:
        """How to reach this node's memory now."""
        return await call(self._bus, f"{subjects.kv_tier(node)}.describe", Describe(), NodeInfo, timeout_s=timeout_s)

    async def reserve(self, node: NodeId, request: Reserve, timeout_s: float) -> Reserved:
        return await call(self._bus, f"{subjects.kv_tier(node)}.reserve", request, Reserved, timeout_s=timeout_s)

    async def commit(self, node: NodeId, lease_id: LeaseId, chunk: WrittenChunk, timeout_s: float) -> Committed:
        request = Commit(lease_id=lease_id, chunks=(chunk,))
        return await call(self._bus, f"{subjects.kv_tier(node)}.commit", request, Committed, timeout_s=timeout_s)

    async def acquire(self, node: NodeId, request: Acquire, deadline_ns: int, context: Context) -> Acquired:
        with attached(context):
            acquired = await call(
                self._bus,
                f"{subjects.kv_tier(node)}.acquire",
                request,
                Acquired,
                timeout_s=_seconds_until(deadline_ns),
            )
        known = self._known.get(node)
        if known is not None and known.epoch != acquired.epoch:
            del self._known[node]
        return acquired

    async def renew(self, node: NodeId, request: Renew, timeout_s: float) -> Renewed:
        return await call(self._bus, f"{subjects.kv_tier(node)}.renew", request, Renewed, timeout_s=timeout_s)

    async def release(self, node: NodeId, lease_id: LeaseId, timeout_s: float) -> None:
        await call(
            self._bus, f"{subjects.kv_tier(node)}.release", Release(lease_ids=(lease_id,)), Done, timeout_s=timeout_s
        )

    async def report(self, node: NodeId, report: Report) -> None:
        await announce(self._bus, f"{subjects.kv_tier(node)}.report", report)


def _seconds_until(deadline_ns: int) -> float:
    return (deadline_ns - time.time_ns()) / 1e9
