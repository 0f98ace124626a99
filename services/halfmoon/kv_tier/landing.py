"""What has been read: judged by outcome and checksum, made readable, and told in spans."""

import asyncio

import msgspec
import structlog

from halfmoon.bus.errors import BusError
from halfmoon.chunks.checksum import checksum
from halfmoon.kv_tier.flights import Arrival, Flight
from halfmoon.kv_tier.peers import Peers
from halfmoon.kv_tier.store import ChunkStore
from halfmoon.schemas.chunks import ChunkMeta, ChunkOutcome, Tier
from halfmoon.schemas.ids import LeaseId, NodeId
from halfmoon.schemas.kv_tier import AcquiredChunk, ArenaRef, ChunkSource, NodeInfo, Report, SlotRef, WrittenChunk
from halfmoon.tracing import Tracer, attributes, link_to, names, traceparent
from halfmoon.transport.protocol import ReadOutcome, SliceResult

_INLINE_CHECK_BYTES = 1 << 20
_FAILURES = {ReadOutcome.STALE: ChunkOutcome.EXPIRED, ReadOutcome.REFUSED: ChunkOutcome.EXPIRED}


class Landing:
    """Ends flights in what their waiters get; holds nothing itself."""

    def __init__(
        self, store: ChunkStore, peers: Peers, tracer: Tracer, log: structlog.stdlib.BoundLogger, node: NodeId
    ) -> None:
        self._store = store
        self._peers = peers
        self._tracer = tracer
        self._log = log
        self._node = node

    async def judge(
        self, source: NodeId, arrival: Arrival, result: SliceResult, transport: str
    ) -> tuple[ChunkOutcome, str] | None:
        """Why these bytes can't be used; None where they can. The source is told of damage."""
        failure: tuple[ChunkOutcome, str] | None = None
        if result.outcome is not ReadOutcome.OK:
            failure = _FAILURES.get(result.outcome, ChunkOutcome.MISS), result.detail
        elif await _checksum_of(arrival.read.destination) != arrival.checksum:
            failure = ChunkOutcome.CORRUPT, "the payload's checksum is wrong"
            key = arrival.flight.chunk.key
            self._log.warning("corrupt chunk", source=source, key=key.hex(), transport=transport)
            await self._report(source, arrival)
        elif self._store.is_stale(arrival.meta, arrival.flight.request.request_id):
            failure = ChunkOutcome.MISS, "it was flushed"
        outcome = ChunkOutcome.HIT_REMOTE if failure is None else failure[0]
        maker = arrival if arrival.flight.request.unasked else None
        self._trace(
            source,
            arrival.flight,
            outcome,
            transport,
            result.started_ns,
            result.finished_ns,
            tier=arrival.meta.tier,
            maker=maker,
        )
        return failure

    def commit(
        self, own_lease: LeaseId, source: NodeId, arrival: Arrival, result: SliceResult, transport: str
    ) -> AcquiredChunk:
        """Make what was read readable here, leased to all who wait for it. Raises `LeaseGone` and `Misfit`."""
        flight, slot = arrival.flight, arrival.slot
        now_ns = self._store.clock_ns()
        meta = msgspec.structs.replace(
            arrival.meta, tier=Tier.DRAM, checksum=arrival.checksum, hits=0, last_access_ns=now_ns
        )
        keep = any(each.keep for each in flight.waiting)
        written = WrittenChunk(slot=slot.number, generation=arrival.generation, meta=meta, register=keep)
        self._store.commit(own_lease, [written], arrival.traceparent or traceparent(flight.request.context))
        self._store.counters.bytes_pulled += slot.num_bytes
        for waiting in flight.waiting:
            lease = self._store.ledger.leases.get(waiting.lease_id)
            if lease is not None and lease.expires_ns > now_ns:
                self._store.ledger.share(lease, slot, now_ns)
        return AcquiredChunk(
            key=flight.chunk.key,
            index=flight.chunk.index,
            outcome=ChunkOutcome.HIT_REMOTE,
            slot=self._store.reference(slot),
            meta=meta,
            source=source,
            transport=transport,
            num_bytes_moved=slot.num_bytes,
            started_ns=flight.started_ns,
            transfer_started_ns=result.started_ns,
            finished_ns=result.finished_ns,
        )

    def lend(
        self, source: ChunkSource, info: NodeInfo, flight: Flight, slot: SlotRef, meta: ChunkMeta, transport: str
    ) -> AcquiredChunk:
        """Hand on the source's own slot: no byte moves, the reader looks into that arena."""
        now_ns = self._store.clock_ns()
        self._store.counters.bytes_in_place += slot.num_bytes
        self._trace(source.node, flight, ChunkOutcome.HIT_REMOTE, transport, now_ns, now_ns, in_place=True)
        arena = ArenaRef(
            node=info.node,
            epoch=info.epoch,
            path=info.arena_path,
            slot_bytes=info.slot_bytes,
            num_slots=info.num_slots,
        )
        return AcquiredChunk(
            key=flight.chunk.key,
            index=flight.chunk.index,
            outcome=ChunkOutcome.HIT_REMOTE,
            slot=msgspec.structs.replace(slot, arena=arena),
            meta=meta,
            source=source.node,
            transport=transport,
            num_bytes_moved=0,
            started_ns=flight.started_ns,
            transfer_started_ns=now_ns,
            finished_ns=now_ns,
        )

    def _trace(
        self,
        source: NodeId,
        flight: Flight,
        outcome: ChunkOutcome,
        transport: str,
        started_ns: int,
        finished_ns: int,
        *,
        in_place: bool = False,
        tier: Tier = Tier.DRAM,
        maker: Arrival | None = None,
    ) -> None:
        """`tier`: where it was at the source. `maker`: what tells of the request that made the chunk, where none has
        asked for it now."""
        facts = attributes.ChunkFacts(
            request_id=flight.request.request_id if maker is None else maker.meta.request_id,
            key=flight.chunk.key,
            index=flight.chunk.index,
            outcome=outcome,
            tier=tier,
            num_bytes=flight.chunk.num_bytes,
            num_tokens=flight.chunk.num_tokens,
            source=source,
            destination=self._node,
            transport=transport or None,
            queue_wait_ms=(started_ns - flight.started_ns) / 1e6,
            transfer_ms=(finished_ns - started_ns) / 1e6,
            in_place=in_place or None,
        )
        self._tracer.record_span(
            names.KVTIER_TRANSFER,
            started_ns,
            finished_ns,
            parent=flight.request.context,
            attributes=facts.attributes(),
            links=() if maker is None else link_to(maker.traceparent),
        )

    async def _report(self, node: NodeId, arrival: Arrival) -> None:
        """The damage may have been done there, or on the way: that node looks."""
        report = Report(key=arrival.flight.chunk.key, slot=arrival.read.slot, generation=arrival.read.generation)
        try:
            await self._peers.report(node, report)
        except BusError as error:
            self._log.info("a peer can't be told of a damaged chunk", node=node, error=str(error))


async def _checksum_of(payload: memoryview) -> bytes:
    if len(payload) <= _INLINE_CHECK_BYTES:
        return checksum(payload)
    return await asyncio.to_thread(checksum, payload)
