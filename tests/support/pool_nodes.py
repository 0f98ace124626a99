"""Kv-tier nodes on an in-memory bus, in this process, each with a small arena of its own."""

import hashlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from halfmoon.bus.endpoint import read_stream
from halfmoon.bus.errors import StreamGap
from halfmoon.bus.memory import MemoryBroker, MemoryBus
from halfmoon.bus.protocol import Bus
from halfmoon.chunks.checksum import checksum
from halfmoon.kv_tier.config import KvTierConfig
from halfmoon.kv_tier.service import KvTier
from halfmoon.lifecycle.runtime import Runtime
from halfmoon.pool import PoolClient
from halfmoon.pool.client import DEFAULT_TENANT
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkEvent, ChunkMeta
from halfmoon.schemas.ids import ChunkKey, LeaseId, NodeId, RequestId, TenantId, WorkerId
from halfmoon.schemas.kv_tier import ChunkSource, NewChunk, WantedChunk, WrittenChunk
from halfmoon.tracing import setup
from halfmoon.tracing.metrics import Metrics
from support.buses import BusMaker

SLOT_BYTES = 16384
CHUNK_BYTES = 10_000
REQUEST = RequestId("req-1")


def key_of(name: str) -> ChunkKey:
    return ChunkKey(hashlib.sha256(name.encode()).digest())


def content_of(name: str, num_bytes: int = CHUNK_BYTES) -> bytes:
    return (hashlib.sha256(b"content of " + name.encode()).digest() * (num_bytes // 32 + 1))[:num_bytes]


@dataclass
class Node:
    """One running kv-tier, and a client of it."""

    service: KvTier
    client: PoolClient
    bus: Bus
    spans: InMemorySpanExporter
    metrics: Metrics
    failures: list[str]

    @property
    def source(self) -> ChunkSource:
        return ChunkSource(node=self.service.node, epoch=self.client.info.epoch)

    def wanted(self, *names: str, sources: Sequence[ChunkSource] = ()) -> list[WantedChunk]:
        return wanted_of(*names, sources=sources)

    async def write(self, *names: str, register: bool = True, lease_s: float = 10.0) -> LeaseId:
        return await write_chunks(self.client, *names, register=register, lease_s=lease_s)


def wanted_of(*names: str, sources: Sequence[ChunkSource] = ()) -> list[WantedChunk]:
    return [
        WantedChunk(key=key_of(name), index=index, num_tokens=4, num_bytes=CHUNK_BYTES, sources=tuple(sources))
        for index, name in enumerate(names)
    ]


async def write_chunks(
    client: PoolClient,
    *names: str,
    register: bool = True,
    lease_s: float = 10.0,
    tenant: TenantId = DEFAULT_TENANT,
    request_id: RequestId = REQUEST,
) -> LeaseId:
    """Reserve, fill and commit a chunk per name; the lease is still open."""
    new = [
        NewChunk(key=key_of(name), index=index, num_tokens=4, num_bytes=CHUNK_BYTES, register=register)
        for index, name in enumerate(names)
    ]
    reserved = await client.reserve(request_id, new, lease_s=lease_s, tenant=tenant)
    written = []
    for name, chunk in zip(names, reserved.chunks, strict=True):
        assert chunk.slot is not None
        payload = client.payload(chunk.slot)
        payload[:] = content_of(name)
        meta = ChunkMeta(
            key=chunk.key,
            index=chunk.index,
            num_tokens=4,
            num_bytes=CHUNK_BYTES,
            checksum=checksum(payload),
            request_id=request_id,
            created_ns=time.time_ns(),
            tenant=tenant,
        )
        written.append(
            WrittenChunk(slot=chunk.slot.slot, generation=chunk.slot.generation, meta=meta, register=register)
        )
    committed = await client.commit(reserved.lease_id, written)
    assert committed.num_registered <= (len(names) if register else 0)
    return reserved.lease_id


def slots_of(node: Node) -> tuple[int, int, int, int]:
    """Free, staged, ready, leased."""
    node.service.store.ledger.check_integrity()
    counts = node.service.store.ledger.slots.counts()
    return counts.free, counts.staged, counts.ready, counts.leased


async def follow(broker: MemoryBroker) -> tuple[MemoryBus, list[ChunkEvent]]:
    """What the stream of chunk events has told, and tells from now on."""
    bus, events = MemoryBus(broker), list[ChunkEvent]()

    async def seen(seq: int, event: ChunkEvent) -> None:
        events.append(event)

    async def gap(gap: StreamGap) -> None:
        raise AssertionError(gap)

    await read_stream(bus, subjects.CHUNKS_STREAM, ChunkEvent, seen, start_seq=1, on_gap=gap)
    return bus, events


async def attached_to(broker: MemoryBroker | BusMaker) -> Bus:
    """A bus on this broker, of whichever kind."""
    return MemoryBus(broker) if isinstance(broker, MemoryBroker) else await broker()


@asynccontextmanager
async def running_node(
    broker: MemoryBroker | BusMaker,
    directory: Path,
    name: str,
    *,
    host: str = "host-1",
    num_slots: int = 8,
    settings: Mapping[str, object] | None = None,
) -> AsyncIterator[Node]:
    spans = InMemorySpanExporter()
    telemetry = setup("kv_tier", exporters={"memory": spans})
    bus, metrics, failures = await attached_to(broker), Metrics(), list[str]()
    values: dict[str, object] = {
        "node": name,
        "host": host,
        "arena_bytes": num_slots * SLOT_BYTES,
        "slot_bytes": SLOT_BYTES,
        "shm_dir": directory,
        "cluster_secret": "moon",
        **(settings or {}),
    }
    runtime = Runtime(
        service="kv_tier",
        worker_id=WorkerId(f"kv-tier-{name}"),
        config=KvTierConfig(**values),  # type: ignore[arg-type]
        bus=bus,
        telemetry=telemetry,
        metrics=metrics,
        log=structlog.stdlib.get_logger("test"),
        started_ns=time.time_ns(),
        fail=failures.append,
    )
    service = KvTier(runtime)
    client_bus = await attached_to(broker)
    client = PoolClient(client_bus, NodeId(name), WorkerId(f"worker-{name}"))
    try:
        await service.start()
        await client.describe()
        yield Node(service, client, bus, spans, metrics, failures)
        assert failures == []
    finally:
        await client.close()
        await service.drain()
        await service.stop()
        await service.stop()
        await client_bus.close()
        await bus.close()
        await telemetry.aclose()
