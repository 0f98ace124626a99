"""A registry inside the test, and the messages that it lives on."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self

import msgspec
import structlog

from halfmoon.bus.codec import Decoder
from halfmoon.bus.endpoint import call, submit
from halfmoon.bus.errors import BusTimeout, NoResponders, RemoteError
from halfmoon.bus.protocol import Bus, BusMessage
from halfmoon.bus.streams import CHUNKS
from halfmoon.lifecycle import Runtime
from halfmoon.registry.config import RegistryConfig
from halfmoon.registry.service import Registry
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import (
    ChunkEvent,
    ChunkEvicted,
    ChunkMeta,
    ChunkPlacement,
    ChunkRegistered,
    EvictReason,
    NodeCleared,
)
from halfmoon.schemas.ids import ChunkKey, NodeId, RequestId, WorkerId
from halfmoon.schemas.kv_tier import Inventory, InventoryPage
from halfmoon.schemas.members import MemberState, NodeHeartbeat
from halfmoon.schemas.registry import LookedUp, Lookup, MemberEvent, MemberLost, Snapshot, SnapshotPage
from halfmoon.tracing import setup
from halfmoon.tracing.metrics import Metrics
from support.heart import Heart

CALL_TIMEOUT_S = 5.0


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "big"))


def meta(number: int) -> ChunkMeta:
    return ChunkMeta(
        key=key(number),
        index=number,
        num_tokens=256,
        num_bytes=4096,
        checksum=bytes(16),
        request_id=RequestId("req-1"),
        created_ns=1,
    )


def registered(node: str, epoch: int, *numbers: int) -> ChunkRegistered:
    return ChunkRegistered(node=NodeId(node), epoch=epoch, chunks=tuple(meta(number) for number in numbers))


def evicted(node: str, epoch: int, *numbers: int) -> ChunkEvicted:
    keys = tuple(key(number) for number in numbers)
    return ChunkEvicted(node=NodeId(node), epoch=epoch, keys=keys, reason=EvictReason.CAPACITY)


def cleared(node: str, epoch: int) -> NodeCleared:
    return NodeCleared(node=NodeId(node), epoch=epoch)


def placement(node: str, epoch: int, number: int) -> ChunkPlacement:
    return ChunkPlacement(node=NodeId(node), epoch=epoch, chunk=meta(number))


def pool_beat(worker: str, node: str, epoch: int, started_ns: int = 1) -> NodeHeartbeat:
    return NodeHeartbeat(
        worker=WorkerId(worker),
        node=NodeId(node),
        epoch=epoch,
        started_ns=started_ns,
        state=MemberState.SERVING,
        host="host",
    )


async def publish(bus: Bus, event: ChunkEvent) -> int:
    """Into the stream, as a kv-tier does; the sequence."""
    of_evict = isinstance(event, ChunkEvicted)
    subject = subjects.evict(event.node) if of_evict else subjects.chunk_registered(event.node)
    return await submit(bus, subject, event)


async def lookup(bus: Bus, *numbers: int) -> tuple[tuple[ChunkPlacement, ...], ...]:
    asked = Lookup(keys=tuple(key(number) for number in numbers))
    return (await call(bus, subjects.registry("lookup"), asked, LookedUp, timeout_s=CALL_TIMEOUT_S)).placements


async def snapshot(bus: Bus, limit: int = 5000) -> tuple[list[ChunkPlacement], int, dict[NodeId, int]]:
    """All pages: the placements, the stream sequence, and the nodes' epochs."""
    placements: list[ChunkPlacement] = []
    epochs: dict[NodeId, int] = {}
    ask = Snapshot(limit=limit)
    while True:
        page = await call(bus, subjects.registry("snapshot"), ask, SnapshotPage, timeout_s=CALL_TIMEOUT_S)
        placements += page.placements
        epochs |= page.epochs
        if page.cursor is None:
            return placements, page.stream_seq, epochs
        ask = Snapshot(cursor=page.cursor, revision=page.revision, limit=limit)


async def inventory(bus: Bus, node: str, limit: int = 4096) -> tuple[set[ChunkKey], int]:
    """All pages: the keys, and how many of the last page's changes are untold."""
    keys: list[ChunkKey] = []
    while True:
        ask = Inventory(after=keys[-1] if keys else None, limit=limit)
        page = await call(bus, f"{subjects.kv_tier(NodeId(node))}.inventory", ask, InventoryPage, timeout_s=5.0)
        keys += page.keys
        if len(page.keys) < limit:
            assert keys == sorted(set(keys))
            return set(keys), page.pending


async def etcd_agrees(bus: Bus, node: str) -> bool:
    held, pending = await inventory(bus, node)
    placements, _, _ = await snapshot(bus)
    return pending == 0 and {each.chunk.key for each in placements if each.node == node} == held


async def eventually(question: Callable[[], Awaitable[object]], timeout_s: float = 20.0, *, what: str = "") -> None:
    """Ask until the answer is true. A typed refusal counts as not yet."""
    deadline = time.monotonic() + timeout_s
    answer: object = None
    while True:
        try:
            if answer := await question():
                return
        except (RemoteError, BusTimeout, NoResponders) as error:
            answer = error
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what or question} (last: {answer})")
        await asyncio.sleep(0.01)


async def applied(bus: Bus, seq: int, timeout_s: float = 20.0) -> None:
    """Wait until the registry has written the stream up to `seq`."""

    async def is_applied() -> bool:
        page = await call(bus, subjects.registry("snapshot"), Snapshot(limit=1), SnapshotPage, timeout_s=CALL_TIMEOUT_S)
        return page.stream_seq >= seq

    await eventually(is_applied, timeout_s, what=f"applied up to {seq}")


class Ear:
    """Hears member events."""

    def __init__(self) -> None:
        self.heard: list[MemberEvent] = []
        self._decoder: Decoder[MemberEvent] = Decoder(MemberEvent)

    async def listen(self, bus: Bus) -> None:
        async def hear(message: BusMessage) -> None:
            self.heard.append(self._decoder.decode(message.data))

        await bus.subscribe(subjects.MEMBER_EVENTS, hear)

    def of(self, worker: str) -> list[MemberEvent]:
        return [event for event in self.heard if event.worker == worker]

    def has_lost(self, worker: str) -> bool:
        return any(isinstance(event, MemberLost) for event in self.of(worker))


class RunningRegistry:
    """A registry with its heartbeats, as its process would run it. An async context manager."""

    def __init__(
        self, bus: Bus, folder: Path, etcd_url: str, prefix: str, name: str = "registry-1", **extra: float
    ) -> None:
        self.bus = bus
        self.failures: list[str] = []
        self.worker = WorkerId(name)
        self.telemetry = setup("registry")
        settings = {"etcd_url": etcd_url, "key_prefix": prefix, "data_dir": folder, **extra}
        config = self.config = msgspec.convert(settings, RegistryConfig)
        self.service = Registry(
            Runtime(
                service="registry",
                worker_id=self.worker,
                config=config,
                bus=bus,
                telemetry=self.telemetry,
                metrics=Metrics(),
                log=structlog.stdlib.get_logger("test"),
                started_ns=time.time_ns(),
                fail=self.failures.append,
            )
        )
        self._heart: Heart | None = None

    @property
    def leads(self) -> bool:
        return self.service.leader is not None and self.service.leader.leads()

    async def __aenter__(self) -> Self:
        await self.bus.ensure_stream(CHUNKS)
        await self.service.start()
        self._heart = Heart(self.bus, self.service.heartbeat())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._heart is not None:
            await self._heart.stop()
        await self.service.stop()
        await self.telemetry.aclose()
        assert self.failures == []
