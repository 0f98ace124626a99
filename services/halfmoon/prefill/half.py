"""One prefill half, from its acceptance to its end."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import structlog

from halfmoon.bus import endpoint
from halfmoon.bus.errors import BusError
from halfmoon.bus.protocol import Bus
from halfmoon.chunks.plan import PlannedChunk
from halfmoon.engine.contract import SequenceSpec
from halfmoon.machine import Machine
from halfmoon.pool.client import PoolClient
from halfmoon.prefill.config import Announce, PrefillConfig
from halfmoon.prefill.metrics import PrefillMetrics
from halfmoon.prefill.policy import hold_until_ns, is_gone
from halfmoon.prefill.state import HALF_TABLE, HalfEvent, HalfState
from halfmoon.scheduling.estimates import token_pairs
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkOutcome
from halfmoon.schemas.ids import WorkerId
from halfmoon.schemas.kv_tier import ChunkSource
from halfmoon.schemas.members import RequestProgress
from halfmoon.schemas.splits import HalfEnded, KvFailed, KvReady, PrefillHalf, ReadyChunk, Role
from halfmoon.schemas.wire import Error, ErrorCode, Message
from halfmoon.tracing import Context, Tracer, attributes, record_error
from halfmoon.tracing.names import PREFILL_QUEUE, PREFILL_REQUEST
from halfmoon.worker.jobs import Job
from halfmoon.worker.leases import LeaseSet
from halfmoon.worker.line import Places
from halfmoon.worker.meters import PrefillMeter
from halfmoon.worker.peers import PeerWatch, Watched
from halfmoon.worker.prompt import PromptComputer, PromptJob
from halfmoon.worker.sequences import EngineCrashed, Sequences

CHECK_S = 0.1
"""How often a half that hands over looks whether its decode worker is still there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What all halves of a worker share."""

    worker: WorkerId
    config: PrefillConfig
    bus: Bus
    pool: PoolClient
    sequences: Sequences
    places: Places
    peers: PeerWatch
    computer: PromptComputer
    meter: PrefillMeter
    tracer: Tracer
    metrics: PrefillMetrics
    log: structlog.stdlib.BoundLogger


class PrefillRun:
    """Owns the half's state, its leases, and what it tells to decode and conductor."""

    def __init__(
        self, half: PrefillHalf, chunks: Sequence[PlannedChunk], context: Context, deadline_ns: int, parts: Parts
    ) -> None:
        self.half = half
        self.job = Job()
        self._chunks = chunks
        self._num_tokens = sum(chunk.num_tokens for chunk in chunks)
        self._context = context
        self._deadline_ns = deadline_ns
        self._parts = parts
        self._log = parts.log.bind(request_id=half.request_id, transfer_id=half.transfer_id)
        self._machine = Machine(HALF_TABLE, HalfState.QUEUED)
        self._let_go = asyncio.Event()
        self._accepted_ns = time.time_ns()
        self._num_reused = 0
        self._num_computed = 0
        self._held_back: list[ReadyChunk] = []
        """What decode isn't told of yet, where it is told at the end."""

    @property
    def state(self) -> HalfState:
        return self._machine.state

    @property
    def num_left_tokens(self) -> int:
        """Prompt tokens that wait to be computed."""
        return self._num_tokens - self._num_done

    @property
    def num_left_pairs(self) -> float:
        """The same as token pairs."""
        return token_pairs(self._num_tokens, self._num_done)

    @property
    def _num_done(self) -> int:
        """Tokens from the first on that don't wait to be computed here, as far as is known."""
        if self.state is HalfState.QUEUED:
            num_reusable = max(len(self.half.reuse), self.half.num_hot)
            return sum(chunk.num_tokens for chunk in self._chunks[:num_reusable])
        if self.state in (HalfState.ACQUIRING, HalfState.COMPUTING):
            return self._num_reused + self._num_computed
        return self._num_tokens

    def progress(self) -> RequestProgress:
        return RequestProgress(request_id=self.half.request_id, num_tokens=self._num_reused + self._num_computed)

    def let_go(self) -> None:
        """Decode has what it needs, or gave up: whatever goes on here is of no more use."""
        self._let_go.set()
        if self.state is not HalfState.HANDING_OVER:
            self.job.stop(None)

    async def run(self) -> None:
        half = self.half
        with self._parts.tracer.span(
            PREFILL_REQUEST,
            parent=self._context,
            attributes={
                attributes.REQUEST_ID: half.request_id,
                attributes.TRANSFER_ID: half.transfer_id,
                attributes.WORKER: self._parts.worker,
                attributes.TENANT: half.tenant,
                attributes.GEN_AI_USAGE_INPUT_TOKENS: len(half.tokens),
            },
        ) as span:
            error = await self._outcome()
            self.job.seal()
            span.set_attribute(attributes.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS, self._num_reused)
            if error is not None:
                record_error(span, error.message, error.code.value)
                await self._tell_failure(error)
            self._count()
            await self._send(
                subjects.ended(half.conductor),
                HalfEnded(
                    request_id=half.request_id,
                    transfer_id=half.transfer_id,
                    worker=self._parts.worker,
                    role=Role.PREFILL,
                    error=error,
                    num_reused_tokens=self._num_reused,
                    num_computed_tokens=self._num_computed,
                    duration_s=(time.time_ns() - self._accepted_ns) / 1e9,
                ),
                deadline_ns=None,
            )

    async def _outcome(self) -> Error | None:
        """Serve the half; how it ended. Moves to a final state, whatever happens."""
        try:
            self.job.begin()
            async with asyncio.timeout(max(0.0, (self._deadline_ns - time.time_ns()) / 1e9)) as limit:
                error = await self._serve()
        except asyncio.CancelledError:
            error = self.job.stop_error
            if error is None and not self._let_go.is_set():
                raise
        except TimeoutError as timeout:
            if limit.expired():
                error = Error(code=ErrorCode.DEADLINE, message="the deadline passed before the prompt was computed")
            else:
                error = self._internal(timeout)
        except EngineCrashed as crash:
            error = Error(code=ErrorCode.INTERNAL, message=str(crash))
        except Exception as unexpected:
            error = self._internal(unexpected)
        if error is None:
            self._machine.fire(HalfEvent.LET_GO)
        elif error.code is ErrorCode.CANCELLED:
            self._machine.fire(HalfEvent.CANCEL)
        else:
            self._machine.fire(HalfEvent.FAIL)
        return error

    async def _serve(self) -> Error | None:
        # From the beginning: a decode worker that is restarted while this computes has forgotten what it was told.
        with self._parts.peers.watching(self.half.decode_worker) as reader:
            async with self._leases() as leases:
                error = await self._in_turn(leases)
                if self._parts.config.announce is Announce.END:
                    await self._tell_ready(self._held_back)
                self._machine.fire(HalfEvent.COMPUTED)
                self._parts.metrics.duration_s.observe((time.time_ns() - self._accepted_ns) / 1e9)
                if error is not None:
                    self._log.warning("prompt computed in part; decode computes the rest", error=error.message)
                    await self._tell_failure(error)
                await self._hold(reader)
        return None

    async def _in_turn(self, leases: LeaseSet) -> Error | None:
        parts = self._parts
        async with AsyncExitStack() as turn:
            with parts.tracer.span(PREFILL_QUEUE):
                await turn.enter_async_context(parts.places.place(priority=self.half.priority))
            parts.metrics.queue_s.observe((time.time_ns() - self._accepted_ns) / 1e9)
            self._machine.fire(HalfEvent.START)
            return await self._make(leases)

    async def _make(self, leases: LeaseSet) -> Error | None:
        """Acquire, announce, compute, announce; why it ended before the last chunk."""
        parts, half = self._parts, self.half
        job = PromptJob(
            request_id=half.request_id,
            model=half.model,
            tenant=half.tenant,
            chunks=self._chunks,
            reuse=half.reuse,
        )
        hits = await parts.computer.acquire(job, leases)
        self._num_reused = hits.num_tokens
        self._machine.fire(HalfEvent.ACQUIRED)
        if hits.num_chunks or not self._chunks:
            await self._announce(hits.ready())
        if hits.num_chunks == len(self._chunks):
            return None
        spec = SequenceSpec(
            f"{half.transfer_id}/{half.attempt}",
            half.tokens,
            len(half.tokens),
            num_loadable=hits.num_tokens,
            has_sinks=True,
            root=half.root,
        )
        async with parts.sequences.sequence(spec, priority=half.priority) as sequence:
            began_s = time.monotonic()
            try:
                computed = await parts.computer.compute(job, hits, sequence, leases, self._on_computed)
            finally:
                num_tokens = self._num_reused + self._num_computed
                parts.meter.computed(began_s, time.monotonic(), num_tokens=num_tokens, num_computed=self._num_computed)
        return computed.error

    async def _on_computed(self, chunks: Sequence[ReadyChunk]) -> None:
        num_hot = sum(chunk.num_tokens for chunk in chunks if chunk.outcome is ChunkOutcome.HIT_HBM)
        self._num_reused += num_hot
        self._num_computed += sum(chunk.num_tokens for chunk in chunks) - num_hot
        await self._announce(chunks)

    async def _hold(self, reader: Watched) -> None:
        """Keep the leases until decode has read what they protect, has had time enough, or is gone."""
        until_ns = hold_until_ns(time.time_ns(), self._deadline_ns, self._parts.config.handover_timeout_s)
        while not self._let_go.is_set():
            if is_gone(reader.silent_s, was_restarted=reader.was_restarted):
                self._log.warning("the decode worker is lost; letting go of the KV", worker=self.half.decode_worker)
                return
            left_s = (until_ns - time.time_ns()) / 1e9
            if left_s <= 0:
                self._log.warning("decode never said that it has the KV; letting go of it")
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, CHECK_S)):
                    await self._let_go.wait()

    def _leases(self) -> LeaseSet:
        return LeaseSet(
            self._parts.pool,
            self.half.request_id,
            tenant=self.half.tenant,
            model=self.half.model,
            root=self.half.root,
            makers=self._parts.sequences.makers,
            lease_s=self._parts.config.lease_s,
            deadline_ns=self._deadline_ns,
            timeout_s=self._parts.config.pool_timeout_s,
        )

    async def _announce(self, chunks: Sequence[ReadyChunk]) -> None:
        if self._parts.config.announce is Announce.END:
            self._held_back += chunks
        else:
            await self._tell_ready(chunks)

    async def _tell_ready(self, chunks: Sequence[ReadyChunk]) -> None:
        node = self._parts.pool.info
        await self._send(
            subjects.kv_ready(self.half.decode_worker),
            KvReady(
                request_id=self.half.request_id,
                transfer_id=self.half.transfer_id,
                source=ChunkSource(node=node.node, epoch=node.epoch),
                chunks=tuple(chunks),
                num_chunks=len(self._chunks),
                cached_tokens=self._num_reused,
                worker=self._parts.worker,
            ),
            deadline_ns=self._deadline_ns,
        )

    async def _tell_failure(self, error: Error) -> None:
        await self._send(
            subjects.kv_ready(self.half.decode_worker),
            KvFailed(
                request_id=self.half.request_id,
                transfer_id=self.half.transfer_id,
                error=error,
                worker=self._parts.worker,
            ),
            deadline_ns=self._deadline_ns,
        )

    async def _send(self, subject: str, message: Message, *, deadline_ns: int | None) -> None:
        """What can't be sent is lost: decode has a deadline for it, and so has the conductor."""
        try:
            await endpoint.announce(self._parts.bus, subject, message, deadline_ns=deadline_ns)
        except BusError as error:
            self._log.warning("message not sent", subject=subject, error=str(error))

    def _internal(self, error: Exception) -> Error:
        self._log.error("half failed", exc_info=error)
        return Error(code=ErrorCode.INTERNAL, message="prefill failed; the worker's log has the details")

    def _count(self) -> None:
        metrics = self._parts.metrics
        metrics.halves.labels(self.state.value).inc()
        metrics.tokens.labels("reused").inc(self._num_reused)
        metrics.tokens.labels("computed").inc(self._num_computed)
