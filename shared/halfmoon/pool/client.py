"""The client of a node's kv-tier: leases by message, bytes through the mapped arena."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from halfmoon.bus.endpoint import announce, call
from halfmoon.bus.errors import BusError
from halfmoon.bus.protocol import Bus
from halfmoon.pool.arena import Arena, ArenaError
from halfmoon.pool.neighbours import Neighbours
from halfmoon.pool.renewal import Renewals
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import ChunkKey, LeaseId, ModelName, NodeId, RequestId, TenantId, WorkerId
from halfmoon.schemas.kv_tier import (
    Acquire,
    Acquired,
    Commit,
    Committed,
    Describe,
    Done,
    NewChunk,
    NodeInfo,
    Release,
    Renew,
    Renewed,
    Report,
    Reserve,
    Reserved,
    SlotRef,
    WantedChunk,
    WrittenChunk,
)
from halfmoon.schemas.pool_stats import PoolStats, Stats
from halfmoon.schemas.wire import Message

R = TypeVar("R", bound=Message)

DEFAULT_LEASE_S = 10.0
DEFAULT_TENANT = TenantId("default")
NO_MODEL = ModelName("")
_RETRY_S = 0.1


class PoolClient:
    """A worker's access to the pool of its node.

    1. `wait_ready` (or `describe`) maps the arena.
    2. `acquire` and `reserve` give leases on slots; they are renewed in the background, at a third of their length,
       until `release`. `commit` makes what was reserved readable.
    3. `payload(slot)` is the slot's memory. Who read it late, or slowly, asks `holds(slot)` afterwards: True means that
       the bytes were the leased chunk's all along. A slot may lie in another arena of this host (`SlotRef.arena`).
    4. `close` gives back what is open. Idempotent.

    A kv-tier that restarts has a new arena and knows no older lease: the first answer that shows it re-maps the arena.
    Views of the old one stay valid memory, and `holds` says False for their slots.

    Raises `RemoteError` for typed refusals and other `BusError` where the kv-tier doesn't answer.
    """

    def __init__(self, bus: Bus, node: NodeId, worker_id: WorkerId, *, call_timeout_s: float = 5.0) -> None:
        self.node = node
        self._bus = bus
        self._worker_id = worker_id
        self._call_timeout_s = call_timeout_s
        self._subject = subjects.kv_tier(node)
        self._info: NodeInfo | None = None
        self._arena: Arena | None = None
        self._neighbours = Neighbours()
        self._reads_neighbours = True
        self._mapping = asyncio.Lock()
        self._open = Renewals(self._renew, f"pool renew {node}")

    @property
    def info(self) -> NodeInfo:
        """The node as last described. Raises RuntimeError before the first `describe`."""
        if self._info is None:
            raise RuntimeError(
                f"the pool of node {self.node!r} isn't mapped yet: call describe() or wait_ready() first"
            )
        return self._info

    @property
    def arena(self) -> Arena:
        """The mapped arena. Raises RuntimeError before the first `describe`."""
        if self._arena is None:
            raise RuntimeError(
                f"the pool of node {self.node!r} isn't mapped yet: call describe() or wait_ready() first"
            )
        return self._arena

    @property
    def num_open_leases(self) -> int:
        return len(self._open)

    async def wait_ready(self, timeout_s: float) -> NodeInfo:
        """`describe`, tried until the kv-tier answers. Raises the last `BusError` after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return await self.describe()
            except BusError:
                if time.monotonic() + _RETRY_S > deadline:
                    raise
            await asyncio.sleep(_RETRY_S)

    async def describe(self) -> NodeInfo:
        """Ask the node how to reach its memory, and map it. Raises `ArenaError` where that can't be mapped here."""
        info = await self._call("describe", Describe(), NodeInfo)
        async with self._mapping:
            if self._info is None or info.epoch > self._info.epoch:
                arena = Arena.attach(Path(info.arena_path), info.slot_bytes, info.num_slots)
                await asyncio.to_thread(arena.touch)
                if self._arena is not None:
                    self._arena.close()
                self._info, self._arena = info, arena
            return self._info

    async def stats(self) -> PoolStats:
        return await self._call("stats", Stats(), PoolStats)

    async def acquire(
        self,
        request_id: RequestId,
        chunks: Sequence[WantedChunk],
        *,
        lease_s: float = DEFAULT_LEASE_S,
        keep: bool = True,
        deadline_ns: int | None = None,
        tenant: TenantId = DEFAULT_TENANT,
        model: ModelName = NO_MODEL,
    ) -> Acquired:
        """Lease chunks for reading; what isn't here is pulled from its sources, until `deadline_ns` (Unix time).

        `keep`: what is pulled stays in this pool and is announced. Never for a hand-over's partial chunk.
        `tenant` and `model` are for the pool's accounts.
        """
        request = Acquire(
            request_id=request_id,
            holder=self._worker_id,
            chunks=tuple(chunks),
            lease_s=lease_s,
            keep=keep,
            in_place=self._reads_neighbours and not keep,
            tenant=tenant,
            model=model,
        )
        self._neighbours.forget_dead()
        acquired = await self._acquire(request, deadline_ns)
        try:
            for chunk in acquired.chunks:
                if chunk.slot is not None and chunk.slot.arena is not None:
                    self._neighbours.arena(chunk.slot.arena)
        except ArenaError:
            # It lies where this process can't see it: from now on the kv-tier copies.
            self._reads_neighbours = False
            await self.release(acquired.lease_id)
            acquired = await self._acquire(msgspec.structs.replace(request, in_place=False), deadline_ns)
        return acquired

    async def reserve(
        self,
        request_id: RequestId,
        chunks: Sequence[NewChunk],
        *,
        lease_s: float = DEFAULT_LEASE_S,
        deadline_ns: int | None = None,
        tenant: TenantId = DEFAULT_TENANT,
    ) -> Reserved:
        """Lease empty slots for writing, for a tenant; where the pool is full, the last of `chunks` get none."""
        request = Reserve(
            request_id=request_id, holder=self._worker_id, chunks=tuple(chunks), lease_s=lease_s, tenant=tenant
        )
        reserved = await self._call("reserve", request, Reserved, deadline_ns)
        await self._opened(reserved.lease_id, reserved.epoch, lease_s)
        return reserved

    async def commit(self, lease_id: LeaseId, chunks: Sequence[WrittenChunk]) -> Committed:
        """Make written chunks readable. Raises `RemoteError` with code `stale` where the lease has expired."""
        return await self._call("commit", Commit(lease_id=lease_id, chunks=tuple(chunks)), Committed)

    async def release(self, *lease_ids: LeaseId) -> None:
        """Give leases back. Where the kv-tier can't be told, they expire by themselves: that isn't an error here."""
        for lease_id in lease_ids:
            self._open.drop(lease_id)
        if lease_ids:
            with contextlib.suppress(BusError):
                await self._call("release", Release(lease_ids=lease_ids), Done)

    async def report(self, key: ChunkKey, slot: SlotRef) -> None:
        """Say that this chunk's checksum is wrong, so that it is offered to nobody else. Waits for no answer."""
        subject = self._subject if slot.arena is None else subjects.kv_tier(slot.arena.node)
        with contextlib.suppress(BusError):
            report = Report(key=key, slot=slot.slot, generation=slot.generation)
            await announce(self._bus, f"{subject}.report", report)

    def is_open(self, lease_id: LeaseId) -> bool:
        """Whether the lease is still being renewed: False once it was released, or found to have expired."""
        return lease_id in self._open

    def payload(self, slot: SlotRef) -> memoryview:
        """The slot's `num_bytes` bytes, page-aligned. Writable; but what is written into another node's stays here.

        Raises `ArenaError` where another node's arena is gone.
        """
        return self._arena_of(slot).slot(slot.slot, slot.num_bytes)

    def holds(self, slot: SlotRef) -> bool:
        """Whether the slot hasn't been freed since it was leased. A look into memory; asks nobody."""
        if slot.arena is not None:
            return self._neighbours.generation(slot.arena, slot.slot) == slot.generation
        return self.arena.generation(slot.slot) == slot.generation

    async def close(self) -> None:
        """Stop renewing, give back what is open, and unmap."""
        lease_ids = await self._open.close()
        if lease_ids:
            with contextlib.suppress(BusError):
                await self._call("release", Release(lease_ids=lease_ids), Done, time.time_ns() + 1_000_000_000)
        if self._arena is not None:
            self._arena.close()
            self._arena = None
            self._info = None
        self._neighbours.close()

    def _arena_of(self, slot: SlotRef) -> Arena:
        return self.arena if slot.arena is None else self._neighbours.arena(slot.arena)

    async def _acquire(self, request: Acquire, deadline_ns: int | None) -> Acquired:
        acquired = await self._call("acquire", request, Acquired, deadline_ns)
        await self._opened(acquired.lease_id, acquired.epoch, request.lease_s)
        return acquired

    async def _opened(self, lease_id: LeaseId, epoch: int, lease_s: float) -> None:
        """Renew this lease from now on, and make sure that the arena is the one it is on."""
        if self._info is None or self._info.epoch != epoch:
            try:
                await self.describe()
            except BaseException:
                await self.release(lease_id)
                raise
        self._open.keep(lease_id, lease_s)

    async def _renew(self, lease_ids: tuple[LeaseId, ...], lease_s: float) -> Renewed:
        return await self._call("renew", Renew(lease_ids=lease_ids, lease_s=lease_s), Renewed)

    async def _call(self, verb: str, message: Message, reply: type[R], deadline_ns: int | None = None) -> R:
        """Bounded by the deadline where there is one, else by `call_timeout_s`."""
        left_s = self._call_timeout_s if deadline_ns is None else (deadline_ns - time.time_ns()) / 1e9
        return await call(
            self._bus, f"{self._subject}.{verb}", message, reply, timeout_s=left_s, deadline_ns=deadline_ns
        )
