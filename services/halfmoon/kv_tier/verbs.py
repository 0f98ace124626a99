"""What a kv-tier can be asked: an endpoint for each verb of `halfmoon.kvtier.<node>.<verb>`, for `nats micro` too."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from halfmoon.bus.endpoint import Endpoint, Envelope, serve
from halfmoon.bus.protocol import Bus, ServiceRecord
from halfmoon.kv_tier.copies import Copier
from halfmoon.kv_tier.listing import Lister
from halfmoon.kv_tier.orders import OrderKeeper
from halfmoon.kv_tier.probe import Prober
from halfmoon.kv_tier.requests import Requests
from halfmoon.lifecycle import VERSION
from halfmoon.schemas import subjects
from halfmoon.schemas.copies import Replicate
from halfmoon.schemas.ids import NodeId
from halfmoon.schemas.kv_tier import (
    Acquire,
    CatchUp,
    Commit,
    Describe,
    FlushChunks,
    Inventory,
    PinChunks,
    Release,
    Renew,
    Report,
    Reserve,
    Retell,
    UnpinChunks,
)
from halfmoon.schemas.listing import ListChunks
from halfmoon.schemas.pool_stats import Stats
from halfmoon.schemas.probes import Probe
from halfmoon.schemas.rdma import RdmaConnect, RdmaDisconnect, RdmaGrant, RdmaHello
from halfmoon.schemas.wire import Message
from halfmoon.transport.rdma.server import RdmaServer

M = TypeVar("M", bound=Message)

_ACQUIRES_AT_ONCE = 64
_RDMA_AT_ONCE = 16
_TAKE_SLOTS = ("acquire", "reserve", "replicate")


class Verbs:
    """Of one node. `open` first, then a call for each part that answers. All of it ends with `undo`."""

    def __init__(self, bus: Bus, node: NodeId, undo: contextlib.AsyncExitStack) -> None:
        self._bus = bus
        self._node = node
        self._undo = undo
        self._record: ServiceRecord | None = None
        self.endpoints: dict[str, Endpoint] = {}

    async def open(self) -> None:
        record = self._record = await self._bus.add_service(
            "halfmoon-kv-tier", VERSION, "KV pool of one node", metadata={"node": self._node}
        )
        self._undo.push_async_callback(record.stop)

    async def drain(self) -> None:
        """Lease nothing new; what is being pulled is finished. Commits and releases are still heard."""
        async with asyncio.TaskGroup() as group:
            for verb in _TAKE_SLOTS:
                if verb in self.endpoints:
                    group.create_task(self.endpoints[verb].drain())

    async def serve_requests(self, requests: Requests) -> None:
        await self._serve("describe", Describe, requests.describe)
        await self._serve("stats", Stats, requests.stats)
        await self._serve("acquire", Acquire, requests.acquire, concurrency=_ACQUIRES_AT_ONCE)
        await self._serve("reserve", Reserve, requests.reserve)
        await self._serve("commit", Commit, requests.commit)
        await self._serve("release", Release, requests.release)
        await self._serve("renew", Renew, requests.renew)
        await self._serve("report", Report, requests.report)
        await self._serve("inventory", Inventory, requests.inventory)
        await self._serve("retell", Retell, requests.retell)

    async def serve_probes(self, prober: Prober) -> None:
        await self._serve("probe", Probe, prober.probe)

    async def serve_orders(self, keeper: OrderKeeper, lister: Lister) -> None:
        await self._serve("flush", FlushChunks, keeper.flush)
        await self._serve("pin", PinChunks, keeper.pin)
        await self._serve("unpin", UnpinChunks, keeper.unpin)
        await self._serve("catch_up", CatchUp, keeper.catch_up)
        await self._serve("list", ListChunks, lister.page)

    async def serve_copies(self, copier: Copier) -> None:
        await self._serve("replicate", Replicate, copier.replicate)

    async def serve_rdma(self, server: RdmaServer) -> None:
        await self._serve("rdma_hello", RdmaHello, lambda request, _: server.hello(request))
        await self._serve(
            "rdma_connect", RdmaConnect, lambda request, _: server.connect(request), concurrency=_RDMA_AT_ONCE
        )
        await self._serve("rdma_grant", RdmaGrant, lambda request, _: server.grant(request), concurrency=_RDMA_AT_ONCE)
        await self._serve("rdma_disconnect", RdmaDisconnect, lambda request, _: server.disconnect(request))

    async def _serve(
        self,
        verb: str,
        inbox: type[M],
        handler: Callable[[M, Envelope], Awaitable[Message]],
        *,
        concurrency: int = 1,
    ) -> None:
        assert self._record is not None
        subject = f"{subjects.kv_tier(self._node)}.{verb}"
        endpoint = await serve(
            self._bus,
            subject,
            inbox,
            handler,
            concurrency=concurrency,
            record=self._record.add_endpoint(verb, subject),
        )
        self.endpoints[verb] = endpoint
        self._undo.push_async_callback(endpoint.unsubscribe)
