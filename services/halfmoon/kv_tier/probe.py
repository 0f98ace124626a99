"""What this node says of itself and of its ways to a peer; the measuring is a real read of a slot of the peer's."""

import asyncio
import os
import secrets
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

import structlog

from halfmoon.bus.endpoint import Envelope
from halfmoon.bus.errors import BusError
from halfmoon.kv_tier.ledger import LeaseGone, Misfit
from halfmoon.kv_tier.peers import BusPeers
from halfmoon.kv_tier.store import ChunkStore
from halfmoon.schemas.chunks import ChunkMeta
from halfmoon.schemas.ids import ChunkKey, LeaseId, NodeId, RequestId, WorkerId, new_lease_id
from halfmoon.schemas.kv_tier import NewChunk, NodeInfo, Reserve, SlotRef, WrittenChunk
from halfmoon.schemas.probes import Probe, Probed, ProbedPath
from halfmoon.transport.choice import Paths
from halfmoon.transport.protocol import ReadOutcome, SliceRead, Transport

MAX_PROBE_BYTES = 1 << 30
MAX_PROBE_S = 10.0
_CALL_S = 2.0
_REQUEST = RequestId("probe")
_BATCH_BYTES = 8 << 20
_MIN_BATCH_SLICES, _MAX_BATCH_SLICES = 8, 64
"""Read at once: as many as a pull usually does; more where slots are small."""


class Unmeasurable(Exception):
    """There is no slot to read from, or none to read into."""


@dataclass(frozen=True, slots=True)
class _Target:
    """A leased slot of the peer's, and memory here to read it into."""

    info: NodeInfo
    lease_id: LeaseId
    slot: SlotRef
    destination: memoryview


class Prober:
    """Answers `Probe`. One at a time: measurements would disturb each other."""

    def __init__(
        self,
        info: NodeInfo,
        store: ChunkStore,
        paths: Paths,
        peers: BusPeers,
        log: structlog.stdlib.BoundLogger,
        *,
        holder: WorkerId,
        memory_dir: str,
    ) -> None:
        self._info = info
        self._store = store
        self._paths = paths
        self._peers = peers
        self._log = log
        self._holder = holder
        self._memory_dir = memory_dir

    async def probe(self, request: Probe, envelope: Envelope) -> Probed:
        """Bounded by `MAX_PROBE_BYTES` and `MAX_PROBE_S` for each transport, whatever was asked."""
        paths: tuple[ProbedPath, ...] = ()
        chosen: str | None = None
        detail = ""
        if request.peer is not None:
            try:
                peer = await self._peers.ask(request.peer, _CALL_S)
            except BusError as error:
                detail = f"node {request.peer} does not answer: {error}"
            else:
                paths, detail = await self._look(peer, request)
                choice = self._paths.choose(peer)
                usable = {path.transport for path in paths if path.is_usable}
                chosen = next((each.name for each in choice.usable if each.name in usable), None)
        memory = await asyncio.to_thread(os.statvfs, self._memory_dir)
        return Probed(
            node=self._info.node,
            epoch=self._info.epoch,
            host=self._info.host,
            now_ns=time.time_ns(),
            memory_dir=self._memory_dir,
            memory_total_bytes=memory.f_blocks * memory.f_frsize,
            memory_free_bytes=memory.f_bavail * memory.f_frsize,
            peer=request.peer,
            paths=paths,
            chosen=chosen,
            detail=detail,
        )

    async def _look(self, peer: NodeInfo, request: Probe) -> tuple[tuple[ProbedPath, ...], str]:
        """Every transport, measured where it can be; and why they couldn't."""
        async with AsyncExitStack() as undo:
            target: _Target | None = None
            detail = ""
            if request.num_bytes > 0:
                try:
                    target = await self._target(peer, undo)
                except (BusError, LeaseGone, Misfit, Unmeasurable) as error:
                    detail = f"not measured: {error}"
            paths = [await self._one(transport, peer, target, request) for transport in self._paths.transports]
        return tuple(paths), detail

    async def _one(self, transport: Transport, peer: NodeInfo, target: _Target | None, request: Probe) -> ProbedPath:
        reason = transport.unavailable(peer)
        if reason is not None:
            return ProbedPath(transport=transport.name, is_usable=False, reason=reason)
        if target is None:
            reason = self._paths.choose(peer).reasons.get(transport.name, "")
            return ProbedPath(transport=transport.name, is_usable=not reason, reason=reason)
        return await self._measure(transport, target, request)

    async def _measure(self, transport: Transport, target: _Target, request: Probe) -> ProbedPath:
        """Also of a path that is set aside: should it work again, it is known from now on."""
        limit_ns = int(min(request.time_limit_s, MAX_PROBE_S) * 1e9)
        limit_bytes = min(request.num_bytes, MAX_PROBE_BYTES)
        slice_bytes = len(target.destination)
        batch_slices = max(_MIN_BATCH_SLICES, min(_MAX_BATCH_SLICES, _BATCH_BYTES // slice_bytes))
        batch_bytes = batch_slices * slice_bytes
        num_bytes = 0
        started_ns = 0
        begun_ns = time.time_ns()
        while True:
            one = SliceRead(target.slot.slot, target.slot.generation, 0, target.destination)
            # The first read connects; it isn't counted.
            slices = [one] * (batch_slices if started_ns else 1)
            results = await self._paths.read_over(
                transport, target.info, target.lease_id, slices, deadline_ns=begun_ns + 2 * limit_ns
            )
            bad = next((result for result in results if result.outcome is not ReadOutcome.OK), None)
            now_ns = time.time_ns()
            if bad is not None:
                return ProbedPath(transport=transport.name, is_usable=False, reason=f"{bad.outcome}: {bad.detail}")
            if started_ns:
                num_bytes += batch_bytes
                if num_bytes + batch_bytes > limit_bytes or now_ns - begun_ns >= limit_ns:
                    break
            else:
                started_ns = now_ns
        return ProbedPath(
            transport=transport.name,
            is_usable=True,
            gb_per_s=num_bytes / max(1, now_ns - started_ns),
            num_bytes=num_bytes,
            slice_bytes=slice_bytes,
        )

    async def _target(self, peer: NodeInfo, undo: AsyncExitStack) -> _Target:
        """Through the verbs that everybody uses; `undo` gives all back. What the peer's slot holds doesn't matter."""
        num_bytes = min(self._info.slot_bytes, peer.slot_bytes)
        key = ChunkKey(secrets.token_bytes(32))
        own_lease = new_lease_id()
        now_ns = self._store.clock_ns()
        lease_s = 4 * MAX_PROBE_S
        self._store.ledger.open_lease(own_lease, self._holder, _REQUEST, now_ns + int(lease_s * 1e9))
        undo.callback(lambda: self._store.ledger.release(own_lease, self._store.clock_ns()))
        destination = self._store.reserve(own_lease, key, num_bytes)
        if destination is None:
            raise Unmeasurable("every slot of this pool is in use")
        new = NewChunk(key=key, index=0, num_tokens=1, num_bytes=num_bytes, register=False)
        request = Reserve(request_id=_REQUEST, holder=self._holder, chunks=(new,), lease_s=lease_s)
        reserved = await self._peers.reserve(peer.node, request, _CALL_S)
        undo.push_async_callback(self._give_back, peer.node, reserved.lease_id)
        slot = reserved.chunks[0].slot
        if slot is None:
            raise Unmeasurable(f"every slot of node {peer.node} is in use")
        meta = ChunkMeta(
            key=key,
            index=0,
            num_tokens=1,
            num_bytes=num_bytes,
            checksum=b"",
            request_id=_REQUEST,
            created_ns=time.time_ns(),
        )
        written = WrittenChunk(slot=slot.slot, generation=slot.generation, meta=meta, register=False)
        await self._peers.commit(peer.node, reserved.lease_id, written, _CALL_S)
        return _Target(peer, reserved.lease_id, slot, self._store.payload(destination))

    async def _give_back(self, node: NodeId, lease_id: LeaseId) -> None:
        try:
            await self._peers.release(node, lease_id, _CALL_S)
        except BusError as error:
            self._log.info("a probe's lease is left to expire", node=node, error=str(error))
