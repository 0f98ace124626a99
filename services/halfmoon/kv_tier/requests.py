"""What a kv-tier answers to each request: messages in, messages out. The verbs of `halfmoon.kvtier.<node>.<verb>`."""

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec
import structlog

from halfmoon.bus.endpoint import Envelope
from halfmoon.bus.errors import RemoteError
from halfmoon.chunks.checksum import checksum
from halfmoon.chunks.keys import KEY_BYTES
from halfmoon.kv_tier import policy
from halfmoon.kv_tier.flights import PullRequest
from halfmoon.kv_tier.ledger import LeaseGone, Misfit
from halfmoon.kv_tier.orders import OrderKeeper
from halfmoon.kv_tier.pull import Puller
from halfmoon.kv_tier.ssd.reads import SsdReader
from halfmoon.kv_tier.store import ChunkStore
from halfmoon.schemas.chunks import ChunkOutcome, EvictReason, Tier
from halfmoon.schemas.ids import LeaseId, RequestId, WorkerId, new_lease_id
from halfmoon.schemas.kv_tier import (
    Acquire,
    Acquired,
    AcquiredChunk,
    Commit,
    Committed,
    Describe,
    Done,
    Inventory,
    InventoryPage,
    NodeInfo,
    Release,
    Renew,
    Renewed,
    Report,
    Reserve,
    Reserved,
    ReservedChunk,
    Retell,
    WantedChunk,
)
from halfmoon.schemas.pool_stats import PoolStats, Stats
from halfmoon.schemas.wire import Error, ErrorCode
from halfmoon.tracing import Tracer, attributes, current, names, traceparent

MAX_PAGE_KEYS = 4096
_ANSWER_MARGIN_S = 0.05
"""An acquire ends this much before its caller stops waiting, so that the answer is still heard."""


class Requests:
    """The handlers. They raise `RemoteError` to refuse."""

    def __init__(
        self,
        info: NodeInfo,
        store: ChunkStore,
        puller: Puller,
        tracer: Tracer,
        log: structlog.stdlib.BoundLogger,
        *,
        max_lease_s: float,
        acquire_timeout_s: float,
        bytes_served: Callable[[], int],
        keeper: OrderKeeper,
        reader: SsdReader | None = None,
    ) -> None:
        self._info = info
        self._store = store
        self._puller = puller
        self._reader = reader
        self._keeper = keeper
        self._tracer = tracer
        self._log = log
        self._max_lease_s = max_lease_s
        self._acquire_timeout_s = acquire_timeout_s
        self._bytes_served = bytes_served

    async def describe(self, request: Describe, envelope: Envelope) -> NodeInfo:
        return self._info

    async def stats(self, request: Stats, envelope: Envelope) -> PoolStats:
        self._store.expire()
        return msgspec.structs.replace(self._store.stats(self._bytes_served()), tenants=self._store.accounts.rows())

    async def acquire(self, request: Acquire, envelope: Envelope) -> Acquired:
        facts: dict[str, attributes.AttributeValue] = {
            attributes.REQUEST_ID: request.request_id,
            attributes.NODE: self._info.node,
            attributes.WORKER: request.holder,
            "halfmoon.num_chunks": len(request.chunks),
        }
        with self._tracer.span(names.KVTIER_ACQUIRE, attributes=facts) as span:
            await self._keeper.current()
            acquired = await self._acquire(request, self._deadline_ns(envelope))
            for outcome in ChunkOutcome:
                if count := sum(chunk.outcome is outcome for chunk in acquired.chunks):
                    span.set_attribute(f"halfmoon.num_{outcome.value}", count)
            return acquired

    async def reserve(self, request: Reserve, envelope: Envelope) -> Reserved:
        if oversized := [chunk for chunk in request.chunks if not 0 < chunk.num_bytes <= self._info.slot_bytes]:
            raise _refusal(
                ErrorCode.INVALID_REQUEST,
                f"a chunk of {oversized[0].num_bytes} bytes doesn't fit this pool's slots of {self._info.slot_bytes}: "
                "set slot_bytes of the kv-tier, or a smaller chunk_tokens",
            )
        expires_ns = self._expiry_ns(request.lease_s)
        lease_id = self._open_lease(request.holder, request.request_id, expires_ns)
        self._store.make_room(len(request.chunks), request.tenant)
        reserved: list[ReservedChunk] = []
        full = False
        for chunk in request.chunks:
            slot = None if full else self._store.reserve(lease_id, chunk.key, chunk.num_bytes, request.tenant)
            full = slot is None
            reference = None if slot is None else self._store.reference(slot)
            reserved.append(ReservedChunk(key=chunk.key, index=chunk.index, slot=reference))
        return Reserved(lease_id=lease_id, expires_ns=expires_ns, chunks=tuple(reserved), epoch=self._info.epoch)

    async def commit(self, request: Commit, envelope: Envelope) -> Committed:
        if any(not 0 <= chunk.slot < self._info.num_slots for chunk in request.chunks):
            raise _refusal(ErrorCode.INVALID_REQUEST, f"a slot that isn't one of this pool's {self._info.num_slots}")
        try:
            num_registered = self._store.commit(request.lease_id, request.chunks, traceparent(envelope.context))
        except LeaseGone as error:
            raise _refusal(ErrorCode.STALE, str(error)) from error
        except Misfit as error:
            raise _refusal(ErrorCode.INVALID_REQUEST, str(error)) from error
        return Committed(num_registered=num_registered)

    async def release(self, request: Release, envelope: Envelope) -> Done:
        now_ns = self._store.clock_ns()
        for lease_id in request.lease_ids:
            self._store.ledger.release(lease_id, now_ns)
        self._puller.settle()
        return Done()

    async def renew(self, request: Renew, envelope: Envelope) -> Renewed:
        expires_ns = self._expiry_ns(request.lease_s)
        now_ns = self._store.clock_ns()
        self._store.expire()
        gone = [each for each in request.lease_ids if not self._store.ledger.renew(each, expires_ns, now_ns)]
        return Renewed(expired=tuple(gone))

    async def report(self, request: Report, envelope: Envelope) -> Done:
        """Reports of what has gone meanwhile, or is as it should be, change nothing."""
        slot = self._store.ledger.readable(request.slot, request.generation, request.key)
        if slot is not None and slot.meta is not None:
            expected = slot.meta.checksum
            is_damaged = await asyncio.to_thread(checksum, self._store.payload(slot)) != expected
            is_there = self._store.ledger.readable(request.slot, request.generation, request.key) is slot
            if is_damaged and is_there:
                self._log.warning("a damaged chunk is withdrawn", key=request.key.hex(), slot=request.slot)
                self._store.withdraw([slot], EvictReason.CORRUPT)
        return Done()

    async def inventory(self, request: Inventory, envelope: Envelope) -> InventoryPage:
        if not 1 <= request.limit <= MAX_PAGE_KEYS:
            raise _refusal(ErrorCode.INVALID_REQUEST, f"limit is from 1 to {MAX_PAGE_KEYS}, got {request.limit}")
        tiers = self._store.inventory(request.after, request.limit)
        return InventoryPage(
            node=self._info.node,
            epoch=self._info.epoch,
            keys=tuple(tiers),
            pending=self._store.num_untold,
            on_ssd=tuple(key for key, tier in tiers.items() if tier is Tier.SSD),
        )

    async def retell(self, request: Retell, envelope: Envelope) -> Done:
        if len(request.keys) > MAX_PAGE_KEYS or any(len(key) != KEY_BYTES for key in request.keys):
            raise _refusal(ErrorCode.INVALID_REQUEST, f"at most {MAX_PAGE_KEYS} keys of {KEY_BYTES} bytes each")
        self._store.retell(request.keys)
        return Done()

    async def _acquire(self, request: Acquire, deadline_ns: int) -> Acquired:
        ledger = self._store.ledger
        # It must outlast the pulls; its true length begins with the answer.
        pulls_ns = max(0, deadline_ns - time.time_ns())
        lease_id = self._open_lease(request.holder, request.request_id, self._expiry_ns(request.lease_s) + pulls_ns)
        wanted = request.chunks
        here = {chunk.key for chunk in wanted if ledger.slots.find(chunk.key) is not None}
        cached = [chunk.key for chunk in wanted if chunk.key in here]
        if not request.unasked:
            self._store.evictor.asked(request.request_id, len(wanted), cached, self._store.clock_ns())
            self._store.unasked.used(cached)
        lower = self._store.lower
        if lower is not None and not request.unasked:
            lower.asked(request.request_id, [chunk.key for chunk in wanted], self._store.clock_ns())
        plan = policy.plan_acquire(wanted, here, self._info.node, () if lower is None else lower.ssd)
        answers: dict[int, AcquiredChunk] = {}
        for position in plan.local:
            answers[position] = self._local(lease_id, wanted[position], request)
        for position in plan.missing:
            chunk = wanted[position]
            detail = "not in this pool, and no other node is named that has it"
            answers[position] = AcquiredChunk(
                key=chunk.key, index=chunk.index, outcome=ChunkOutcome.MISS, detail=detail
            )
        if plan.pulls or plan.reads:
            pull = PullRequest(
                request.request_id,
                lease_id,
                request.keep,
                deadline_ns,
                current(),
                in_place=request.in_place,
                lease_s=min(request.lease_s, self._max_lease_s),
            )
            answers.update(await self._bring(pull, wanted, plan, direct=request.direct or request.unasked))
        expires_ns = self._expiry_ns(request.lease_s)
        if not ledger.renew(lease_id, expires_ns, self._store.clock_ns()):
            answers = {position: _expired(answer) for position, answer in answers.items()}
        chunks = tuple(answers[position] for position in range(len(wanted)))
        if not request.unasked:
            self._count(request, chunks)
        return Acquired(lease_id=lease_id, expires_ns=expires_ns, chunks=chunks, epoch=self._info.epoch)

    async def _bring(
        self, pull: PullRequest, wanted: Sequence[WantedChunk], plan: policy.AcquirePlan, *, direct: bool
    ) -> dict[int, AcquiredChunk]:
        """From the SSD and from other nodes, at once; what the SSD can't give is then sought at other nodes too."""

        async def pulled(positions: Sequence[int]) -> dict[int, AcquiredChunk]:
            chunks = await self._puller.pull(pull, [wanted[position] for position in positions]) if positions else []
            return dict(zip(positions, chunks, strict=True))

        if self._reader is None or not plan.reads:
            return await pulled(plan.pulls)
        read, answers = await asyncio.gather(
            self._reader.read(pull, [wanted[position] for position in plan.reads], direct=direct), pulled(plan.pulls)
        )
        answers |= dict(zip(plan.reads, read, strict=True))
        elsewhere = policy.with_sources(wanted, [at for at in plan.reads if answers[at].slot is None], self._info.node)
        return answers | await pulled(elsewhere)

    def _count(self, request: Acquire, chunks: tuple[AcquiredChunk, ...]) -> None:
        counters = self._store.counters
        counters.hits_local += sum(chunk.outcome is ChunkOutcome.HIT_LOCAL for chunk in chunks)
        counters.hits_remote += sum(chunk.outcome is ChunkOutcome.HIT_REMOTE for chunk in chunks)
        if self._store.lower is not None:
            self._store.lower.hits += sum(chunk.outcome is ChunkOutcome.SSD for chunk in chunks)
        counters.misses += sum(chunk.slot is None for chunk in chunks)
        self._store.accounts.asked(request, chunks)

    def _local(self, lease_id: LeaseId, chunk: WantedChunk, request: Acquire) -> AcquiredChunk:
        slot = self._store.ledger.lease_cached(lease_id, chunk.key, self._store.clock_ns())
        assert slot is not None
        assert slot.meta is not None
        lower, is_use_here = self._store.lower, not (request.direct or request.unasked)
        if lower is not None and not slot.registered and is_use_here and lower.note_read(chunk.key, request.request_id):
            self._store.promote(slot, request.request_id)
        meta = msgspec.structs.replace(slot.meta, hits=slot.hits, last_access_ns=slot.last_access_ns)
        return AcquiredChunk(
            key=chunk.key,
            index=chunk.index,
            outcome=ChunkOutcome.HIT_LOCAL,
            slot=self._store.reference(slot),
            meta=meta,
            source=self._info.node,
            traceparent=slot.traceparent,
        )

    def _open_lease(self, holder: WorkerId, request_id: RequestId, expires_ns: int) -> LeaseId:
        lease_id = new_lease_id()
        self._store.expire()
        self._store.ledger.open_lease(lease_id, holder, request_id, expires_ns)
        return lease_id

    def _expiry_ns(self, lease_s: float) -> int:
        if not lease_s > 0:
            raise _refusal(ErrorCode.INVALID_REQUEST, f"lease_s must be above zero, got {lease_s}")
        return self._store.clock_ns() + int(min(lease_s, self._max_lease_s) * 1e9)

    def _deadline_ns(self, envelope: Envelope) -> int:
        limit_ns = time.time_ns() + int(self._acquire_timeout_s * 1e9)
        if envelope.deadline_ns is None:
            return limit_ns
        return min(limit_ns, envelope.deadline_ns - int(_ANSWER_MARGIN_S * 1e9))


def _expired(answer: AcquiredChunk) -> AcquiredChunk:
    if answer.slot is None:
        return answer
    return msgspec.structs.replace(
        answer, outcome=ChunkOutcome.EXPIRED, slot=None, meta=None, detail="the lease expired before the answer"
    )


def _refusal(code: ErrorCode, message: str) -> RemoteError:
    return RemoteError(Error(code=code, message=message))
