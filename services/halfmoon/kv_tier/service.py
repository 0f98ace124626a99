"""The shell of a kv-tier: builds its parts, serves its verbs, sweeps expired leases, and tells the cluster."""

import asyncio
import contextlib
import os
import time
from collections.abc import Coroutine
from typing import Any

from halfmoon.bus.endpoint import call, submit
from halfmoon.bus.errors import BusError
from halfmoon.bus.streams import CHUNKS
from halfmoon.kv_tier.config import KvTierConfig
from halfmoon.kv_tier.copies import Copier
from halfmoon.kv_tier.events import Announcer, Outbox
from halfmoon.kv_tier.listing import Lister
from halfmoon.kv_tier.memory import make_arena, slot_bytes_of
from halfmoon.kv_tier.metrics import CopiesCollector, PathCollector, PoolCollector
from halfmoon.kv_tier.orders import OrderKeeper
from halfmoon.kv_tier.peers import BusPeers
from halfmoon.kv_tier.probe import Prober
from halfmoon.kv_tier.pull import Puller
from halfmoon.kv_tier.rdma import open_rdma
from halfmoon.kv_tier.requests import Requests
from halfmoon.kv_tier.ssd.open import OpenSsd, open_ssd
from halfmoon.kv_tier.ssd.reads import SsdReader
from halfmoon.kv_tier.store import ChunkStore
from halfmoon.kv_tier.transports import advertised, authorizer, make_transports, serve_tcp
from halfmoon.kv_tier.trim import Trimmer
from halfmoon.kv_tier.verbs import Verbs
from halfmoon.lifecycle import Runtime, StartupError
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkEvent, ChunkRegistered, NodeCleared
from halfmoon.schemas.ids import NodeId
from halfmoon.schemas.kv_tier import Describe, NodeInfo
from halfmoon.schemas.members import MemberState, NodeHeartbeat
from halfmoon.tasks import ended
from halfmoon.tracing import Tracer
from halfmoon.transport.choice import Paths
from halfmoon.transport.tcp_server import TcpServer

_SWEEP_S = 0.1
_PUBLISH_TIMEOUT_S = 5.0
_FAREWELL_S = 2.0
_LOOK_AROUND_S = 0.5


class KvTier:
    """One node's pool as a service. See `lifecycle.Service` for its life."""

    def __init__(self, runtime: Runtime[KvTierConfig]) -> None:
        self._runtime = runtime
        self._config = runtime.config
        self._node = NodeId(runtime.config.node)
        self._log = runtime.log.bind(node=self._node)
        self._epoch = time.time_ns()
        self._state = MemberState.LOADING
        self._undo = contextlib.AsyncExitStack()
        self._verbs = Verbs(runtime.bus, self._node, self._undo)
        self._store: ChunkStore | None = None
        self._puller: Puller | None = None
        self._server: TcpServer | None = None
        self._orders: OrderKeeper | None = None
        self._slot_bytes = 0

    @property
    def node(self) -> NodeId:
        return self._node

    @property
    def store(self) -> ChunkStore:
        """The pool. Raises RuntimeError before `start`."""
        if self._store is None:
            raise RuntimeError("the kv-tier isn't started")
        return self._store

    async def start(self) -> None:
        await self._be_the_only_one()
        self._slot_bytes = await slot_bytes_of(self._config)
        arena = await make_arena(self._config, self._slot_bytes, self._epoch, self._undo, self._log)
        announcer = await self._make_announcer()
        tracer = self._runtime.telemetry.tracer
        # Hundreds of thousands of slots take a second to set up: in a thread, so that heartbeats go on.
        try:
            store = self._store = await asyncio.to_thread(
                ChunkStore,
                arena,
                self._epoch,
                announcer,
                tracer,
                eviction_policy=self._config.eviction_policy,
                quotas=self._config.tenants,
                max_pinned_share=self._config.max_pinned_share,
            )
        except ValueError as error:
            raise StartupError(str(error)) from None
        ssd = await open_ssd(self._config, store, tracer, self._undo, self._log, holder=self._runtime.worker_id)
        if ssd is not None:
            self._runtime.metrics.registry.register(ssd.collector)
        server = self._server = serve_tcp(self._config, arena, store, self._epoch, self._undo, self._log)
        rdma = await open_rdma(self._config, arena, authorizer(store), self._epoch, self._runtime.bus, self._undo)
        if rdma.server is not None:
            self._own(rdma.server.sweep(), "rdma")
        info = NodeInfo(
            node=self._node,
            epoch=self._epoch,
            host=self._config.host,
            arena_path=str(arena.path),
            slot_bytes=arena.slot_bytes,
            num_slots=arena.num_slots,
            tcp_address=advertised(self._config, server.address),
            rdma=rdma.offer,
        )
        paths = Paths(make_transports(self._config, rdma.transport))
        self._undo.push_async_callback(paths.close)
        puller = self._puller = self._make_puller(store, paths)
        if ssd is not None:
            ssd.reader.flow = puller.flow
        self._own(self._sweep(store, puller), "sweep")
        self._runtime.metrics.registry.register(
            PoolCollector(
                lambda: store.stats(server.bytes_served),
                lambda: puller.num_flights,
                lambda: puller.num_loans,
                lambda: announcer.outbox.pending,
            )
        )
        self._runtime.metrics.registry.register(PathCollector(paths.health))
        for collector in store.accounts.collectors():
            self._runtime.metrics.registry.register(collector)
        keeper = self._orders = OrderKeeper(store, self._runtime.bus, self._log, None if ssd is None else ssd.lower)
        self._undo.callback(self._runtime.bus.watch_connection(keeper.hear_connection))
        requests = Requests(
            info,
            store,
            puller,
            tracer,
            self._log,
            max_lease_s=self._config.max_lease_s,
            acquire_timeout_s=self._config.acquire_timeout_s,
            bytes_served=lambda: server.bytes_served,
            reader=None if ssd is None else ssd.reader,
            keeper=keeper,
        )
        prober = Prober(
            info,
            store,
            paths,
            BusPeers(self._runtime.bus),
            self._log,
            holder=self._runtime.worker_id,
            memory_dir=str(self._config.shm_dir),
        )
        await self._serve(requests, prober)
        await self._keep_orders(keeper, store, ssd)
        await self._open_copies(store, puller, tracer, None if ssd is None else ssd.reader)
        if rdma.server is not None:
            await self._verbs.serve_rdma(rdma.server)
        self._state = MemberState.SERVING
        self._log.info(
            "pool ready",
            epoch=self._epoch,
            slots=arena.num_slots,
            slot_bytes=arena.slot_bytes,
            tcp=info.tcp_address,
            rdma=rdma.summary,
        )

    async def drain(self) -> None:
        """See `Verbs.drain`."""
        self._state = MemberState.DRAINING
        await self._verbs.drain()

    async def stop(self) -> None:
        self._state = MemberState.DRAINING
        await self._undo.aclose()

    def heartbeat(self) -> NodeHeartbeat:
        store, server = self._store, self._server
        return NodeHeartbeat(
            worker=self._runtime.worker_id,
            node=self._node,
            epoch=self._epoch,
            started_ns=self._runtime.started_ns,
            state=self._state,
            host=self._config.host,
            slot_bytes=self._slot_bytes,
            pool=None if store is None or server is None else store.stats(server.bytes_served),
            queued_transfers=0 if self._puller is None else self._puller.num_flights,
            labels=self._config.labels,
            pid=os.getpid(),
            orders_seq=0 if self._orders is None else self._orders.seq,
            receiving={} if self._puller is None else self._puller.flow.receiving(),
            pulls=() if self._puller is None else self._puller.flow.take(),
        )

    async def _be_the_only_one(self) -> None:
        """Two pools of one name would both answer: the second doesn't start."""
        subject = f"{subjects.kv_tier(self._node)}.describe"
        with contextlib.suppress(BusError):
            other = await call(self._runtime.bus, subject, Describe(), NodeInfo, timeout_s=_LOOK_AROUND_S)
            raise StartupError(
                f"node {self._node!r} is served already, on host {other.host!r} with its arena at {other.arena_path}: "
                "stop that kv-tier, or give this one another node name"
            )

    async def _make_announcer(self) -> Announcer:
        try:
            await self._runtime.bus.ensure_stream(CHUNKS)
        except BusError as error:
            raise StartupError(f"the stream {CHUNKS.name} can't be had: {error}") from None
        announcer = Announcer(Outbox(self._node, self._epoch), self._publish, self._publish_failed)
        self._undo.push_async_callback(self._say_cleared)
        self._own(announcer.run(), "announce")
        return announcer

    def _make_puller(self, store: ChunkStore, paths: Paths) -> Puller:
        puller = Puller(
            store,
            BusPeers(self._runtime.bus),
            paths,
            self._runtime.telemetry.tracer,
            self._log,
            node=self._node,
            holder=self._runtime.worker_id,
            max_batches=self._config.max_transfers,
            batch_chunks=self._config.transfer_chunks,
            in_place=self._config.read_in_place,
        )
        self._undo.push_async_callback(puller.close)
        return puller

    async def _open_copies(self, store: ChunkStore, puller: Puller, tracer: Tracer, reader: SsdReader | None) -> None:
        """Chunks that come without a request, and those that go first because others hold them."""
        config = self._config
        copier = Copier(
            store,
            puller,
            tracer,
            self._log,
            node=self._node,
            holder=self._runtime.worker_id,
            batch_bytes=config.copy_batch_bytes,
            max_share=config.copy_share,
            give_up_s=config.copy_give_up_s,
            reader=reader,
        )
        trimmer = Trimmer(store, self._runtime.bus, self._log, node=self._node, free_share=config.trim_free_share)
        self._undo.push_async_callback(trimmer.close)
        await trimmer.open()
        self._own(copier.run(), "copies")
        self._own(trimmer.run(config.trim_every_s), "trim")
        self._runtime.metrics.registry.register(CopiesCollector(store, copier))
        await self._verbs.serve_copies(copier)

    async def _serve(self, requests: Requests, prober: Prober) -> None:
        await self._verbs.open()
        await self._verbs.serve_requests(requests)
        await self._verbs.serve_probes(prober)

    async def _keep_orders(self, keeper: OrderKeeper, store: ChunkStore, ssd: OpenSsd | None) -> None:
        await self._verbs.serve_orders(keeper, Lister(store))
        self._own(keeper.run(), "orders")
        if ssd is not None:
            self._own(_once(keeper.caught_up, ssd.demoter.run()), "demotion")

    async def _sweep(self, store: ChunkStore, puller: Puller) -> None:
        """Expired leases go even when nobody asks for anything, and what was lent for them elsewhere."""
        while True:
            if expired := store.expire():
                self._log.info("leases expired", count=expired)
            puller.settle()
            await asyncio.sleep(_SWEEP_S)

    async def _publish(self, event: ChunkEvent) -> None:
        registered = isinstance(event, ChunkRegistered)
        subject = subjects.chunk_registered(self._node) if registered else subjects.evict(self._node)
        await submit(self._runtime.bus, subject, event, timeout_s=_PUBLISH_TIMEOUT_S)

    def _publish_failed(self, error: Exception) -> None:
        self._log.warning("chunk events can't be published; they wait", error=str(error))

    async def _say_cleared(self) -> None:
        """The last word of this life: what it held is gone. Where nobody can be told, the next life will say so."""
        event = NodeCleared(node=self._node, epoch=time.time_ns())
        try:
            await submit(self._runtime.bus, subjects.evict(self._node), event, timeout_s=_FAREWELL_S)
        except BusError as error:
            self._log.info("the end of this pool could not be announced", error=str(error))

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run until `stop`. Such a task ends by itself only when it fails, and then the service can't go on."""
        task = asyncio.create_task(work, name=f"kv-tier {name}")
        task.add_done_callback(self._task_ended)

        self._undo.push_async_callback(ended, task)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("a task of the kv-tier failed", task=task.get_name(), exc_info=error)
            self._runtime.fail(f"{task.get_name()} failed: {error!r}")


async def _once(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    try:
        await event.wait()
    except BaseException:
        work.close()
        raise
    await work
