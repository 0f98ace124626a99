"""One decode half, from its acceptance to its one terminal event."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing

import msgspec

from halfmoon.bus import endpoint
from halfmoon.bus.errors import BusError
from halfmoon.chunks.plan import PlannedChunk
from halfmoon.decode.completion import Completion
from halfmoon.decode.kv import Transfer
from halfmoon.decode.outbox import MAX_BATCH_TOKENS, Outbox
from halfmoon.decode.parts import Parts
from halfmoon.decode.policy import completion_limit, num_computed
from halfmoon.decode.standing import Claims
from halfmoon.decode.state import HALF_TABLE, HalfEvent, HalfState, KvProgress
from halfmoon.decode.token_times import TokenTimes
from halfmoon.engine.contract import DecodeSpec, EngineError, SequenceSpec
from halfmoon.machine import Machine
from halfmoon.scheduling.estimates import token_pairs
from halfmoon.schemas import subjects
from halfmoon.schemas.members import RequestProgress
from halfmoon.schemas.requests import Failed, Finished, Usage
from halfmoon.schemas.splits import DecodeHalf, HalfEnded, Role
from halfmoon.schemas.wire import Error, ErrorCode
from halfmoon.tracing import Context, attributes, record_error
from halfmoon.tracing.names import DECODE_GENERATE, DECODE_QUEUE, DECODE_REQUEST, DECODE_WAIT_KV
from halfmoon.worker.jobs import Job
from halfmoon.worker.leases import LeaseSet
from halfmoon.worker.sequences import EngineCrashed, OpenSequence

DROPPED = Error(code=ErrorCode.CANCELLED, message="another worker goes on with it, or has ended it")


class NotFilled(Exception):
    """The prompt's chunks, which were all that was asked for, aren't in a pool; the message says why."""


class DecodeRun:
    """Owns the half's state, its transfer, its completion, and the way to its reader."""

    def __init__(
        self, half: DecodeHalf, chunks: Sequence[PlannedChunk], context: Context, deadline_ns: int, parts: Parts
    ) -> None:
        self.half = half
        self.job = Job()
        self._chunks = chunks
        self._context = context
        self._deadline_ns = deadline_ns
        self._parts = parts
        self._log = parts.log.bind(request_id=half.request_id, transfer_id=half.transfer_id)
        self._machine = Machine(HALF_TABLE, HalfState.QUEUED)
        self._times = TokenTimes()
        self._num_reported = 0
        kv_tokens = parts.sequences.stats().total_tokens
        self._limit = completion_limit(half, parts.sequences.card, kv_tokens)
        self._completion = Completion(parts.codec, half.tokens, half.sampling, self._limit)
        self.transfer = Transfer(
            half.request_id,
            half.transfer_id,
            KvProgress(chunks),
            bus=parts.bus,
            peers=parts.peers,
            puller=parts.puller,
            config=parts.config,
            log=self._log,
        )
        if half.prefill_worker is not None:
            self.transfer.provided_by(half.prefill_worker)
        self._outbox: Outbox | None = None
        self._num_loaded_tokens = 0
        self._num_computed_tokens = 0
        self._cached_tokens = 0

    @property
    def state(self) -> HalfState:
        return self._machine.state

    @property
    def num_left_tokens(self) -> int:
        """Prompt tokens that are to be computed here, as far as is known."""
        if self.state is HalfState.RECOMPUTING or (self.half.prefill_worker is None and self._is_before_tokens()):
            num_hot = self.half.num_hot * self._parts.sequences.card.chunk_tokens if self._is_before_tokens() else 0
            return len(self.half.tokens) - max(self._num_loaded_tokens, num_hot)
        return 0

    @property
    def num_left_pairs(self) -> float:
        """The same as token pairs."""
        return token_pairs(len(self.half.tokens), len(self.half.tokens) - self.num_left_tokens)

    @property
    def context_tokens(self) -> int:
        """Tokens that each step looks at, while it generates."""
        return len(self.half.tokens) + self._completion.num_tokens if self._times.has_begun else 0

    def progress(self) -> RequestProgress:
        """Tokens that have gone out since the last call: what another worker may take for known."""
        sent = self._outbox.sent if self._outbox is not None else []
        new, self._num_reported = sent[self._num_reported :], len(sent)
        return RequestProgress(
            request_id=self.half.request_id,
            num_tokens=len(self.half.known) + len(sent),
            new_tokens=tuple(new),
            cached_tokens=self._reported_cached_tokens(),
        )

    async def run(self) -> None:
        parts, half = self._parts, self.half
        with parts.tracer.span(
            DECODE_REQUEST,
            parent=self._context,
            attributes={
                attributes.REQUEST_ID: half.request_id,
                attributes.TRANSFER_ID: half.transfer_id,
                attributes.WORKER: parts.worker,
                attributes.TENANT: half.tenant,
                attributes.GEN_AI_REQUEST_MODEL: half.model,
            },
        ) as span:
            self._outbox = outbox = self._new_outbox()
            event = await self._outcome(outbox)
            self.job.seal()
            error = event.error if isinstance(event, Failed) else None
            if error is not None:
                record_error(span, error.message, error.code.value)
            await self.transfer.close()
            await outbox.finish(event)
            parts.metrics.halves.labels(self.state.value).inc()
            parts.metrics.tokens.inc(self._completion.num_tokens - len(half.known))
            if not outbox.is_dropped:
                await self._tell_conductor(error)

    async def _outcome(self, outbox: Outbox) -> Finished | Failed:
        """Serve the half; its terminal event. Moves to a final state, whatever happens."""
        try:
            self.job.begin()
            async with asyncio.timeout(max(0.0, (self._deadline_ns - time.time_ns()) / 1e9)) as limit:
                await self._serve(outbox)
        except asyncio.CancelledError:
            if self.job.stop_error is None:
                raise
            error = self.job.stop_error
        except TimeoutError as timeout:
            if limit.expired():
                error = Error(code=ErrorCode.DEADLINE, message="the deadline passed before the completion was finished")
            else:
                error = self._internal(timeout)
        except EngineCrashed as crash:
            error = Error(code=ErrorCode.INTERNAL, message=str(crash))
        except NotFilled as unfilled:
            error = Error(code=ErrorCode.UNAVAILABLE, message=str(unfilled))
        except Exception as unexpected:
            error = self._internal(unexpected)
        else:
            self._machine.fire(HalfEvent.FINISH)
            return self._finished()
        self._machine.fire(HalfEvent.CANCEL if error.code is ErrorCode.CANCELLED else HalfEvent.FAIL)
        return Failed(request_id=self.half.request_id, error=error)

    async def _serve(self, outbox: Outbox) -> None:
        parts, half = self._parts, self.half
        self._completion.resume(half.known)
        if self._limit == 0 and not self._computes_prompt():
            await self._be_filled()
            return
        if self._limit and self._completion.finish_reason is not None:
            return
        tokens = (*half.tokens, *half.known)
        spec = SequenceSpec(
            f"{half.transfer_id}/{half.attempt}",
            tokens,
            len(half.tokens) + self._limit,
            decode=self._decode_spec() if self._limit else None,
            num_loadable=sum(chunk.num_tokens for chunk in self._chunks) if self._is_provided() else 0,
            has_sinks=self._computes_prompt(),
            root=half.root,
        )
        async with self._leases() as leases, AsyncExitStack() as turn:
            with parts.tracer.span(DECODE_QUEUE):
                await turn.enter_async_context(parts.places.place(priority=half.priority))
                sequence = await turn.enter_async_context(parts.sequences.sequence(spec, priority=half.priority))
            parts.metrics.queue_s.observe(self._times.since_accepted_s())
            self._machine.fire(HalfEvent.START)
            started_ns = time.time_ns()
            await self._prepare_kv(sequence, leases)
            await leases.release_all()
            await self.transfer.close()
            parts.metrics.kv_wait_s.observe((time.time_ns() - started_ns) / 1e9)
            if self._limit:
                await self._generate(sequence, outbox)
            elif self.state is HalfState.RECOMPUTING:
                raise NotFilled("the pool of this worker's node had no room for all of the prompt's chunks")

    async def _be_filled(self) -> None:
        """Nothing is to be generated, and others compute the prompt's chunks into a pool: wait until they are there,
        without a place or the engine. Raises `NotFilled`."""
        parts, half = self._parts, self.half
        if half.prefill_worker is not None:
            with parts.tracer.span(DECODE_WAIT_KV):
                reason = await self.transfer.announced()
            if reason is not None:
                raise NotFilled(reason)
            self._cached_tokens = self.transfer.progress.cached_tokens
            return
        self._cached_tokens = half.num_hot * parts.sequences.card.chunk_tokens
        if self._cached_tokens < sum(chunk.num_tokens for chunk in self._chunks if chunk.shared):
            raise NotFilled("no prefill worker had room for this prompt; try again in a while")

    async def _prepare_kv(self, sequence: OpenSequence, leases: LeaseSet) -> None:
        """As much of the prompt's KV as can be had, into the sequence."""
        parts, half = self._parts, self.half
        if self._computes_prompt():
            began_s = time.monotonic()
            made = await parts.colocated.compute(half, self._chunks, sequence, leases)
            parts.prefill_meter.computed(
                began_s, time.monotonic(), num_tokens=made.num_tokens, num_computed=made.num_new
            )
            self._num_loaded_tokens, self._cached_tokens = made.num_tokens, made.num_tokens - made.num_new
            self._num_computed_tokens = made.num_new
            self._machine.fire(HalfEvent.COMPLETE if made.error is None else HalfEvent.GIVE_UP)
            return
        if half.prefill_worker is None:
            await self._take_hot(sequence)
            return
        with parts.tracer.span(DECODE_WAIT_KV) as span:
            reason = await self.transfer.load(sequence, leases, self._machine.fire)
            if reason is not None:
                span.set_attribute("halfmoon.recompute_reason", reason)
                parts.metrics.recomputes.inc()
        progress = self.transfer.progress
        self._num_loaded_tokens = progress.num_loaded_tokens
        self._cached_tokens = min(progress.cached_tokens, self._num_loaded_tokens)

    async def _take_hot(self, sequence: OpenSequence) -> None:
        """Nobody provides the prompt's KV: what the engine holds is taken, and the rest computed."""
        num_hot = await sequence.hot()
        self._parts.puller.skip(self.half.request_id, self.transfer.progress.hot(num_hot))
        self._num_loaded_tokens = self._cached_tokens = min(num_hot, len(self.half.tokens))
        is_complete = self._num_loaded_tokens >= len(self.half.tokens) - 1
        self._machine.fire(HalfEvent.COMPLETE if is_complete else HalfEvent.GIVE_UP)

    async def _generate(self, sequence: OpenSequence, outbox: Outbox) -> None:
        parts, half, completion = self._parts, self.half, self._completion
        start = num_computed(self._num_loaded_tokens, len(sequence.spec.tokens))
        self._num_computed_tokens += max(0, len(half.tokens) - start)
        outbox.start()
        with parts.tracer.span(DECODE_GENERATE) as span:
            last_s = time.monotonic()
            async with aclosing(sequence.decode(start)) as sampled_tokens:
                async for sampled in sampled_tokens:
                    if self.state is HalfState.RECOMPUTING:
                        self._machine.fire(HalfEvent.FIRST_TOKEN)
                    now_s = time.monotonic()
                    parts.metrics.token_s.observe(now_s - last_s)
                    if self._times.token():
                        parts.decode_meter.gap(now_s - last_s)
                    last_s = now_s
                    await outbox.put(completion.push(sampled))
                    if completion.finish_reason is not None:
                        break
            if completion.finish_reason is None:
                raise EngineError(f"the engine ended after {completion.num_tokens} of {self._limit} tokens")
            span.set_attribute(attributes.GEN_AI_USAGE_INPUT_TOKENS, len(half.tokens))
            span.set_attribute(attributes.GEN_AI_USAGE_OUTPUT_TOKENS, completion.num_tokens)
            span.set_attribute(attributes.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS, self._reported_cached_tokens())
            span.set_attribute(attributes.GEN_AI_RESPONSE_FINISH_REASONS, [completion.finish_reason.value])

    def _decode_spec(self) -> DecodeSpec:
        return DecodeSpec(
            msgspec.structs.replace(self.half.sampling, max_tokens=self._limit),
            self.half.seed,
            num_known=len(self.half.known),
            stop_tokens=self._completion.stop_tokens,
        )

    def _finished(self) -> Finished:
        completion = self._completion
        assert completion.finish_reason is not None
        return Finished(
            request_id=self.half.request_id,
            seq=completion.num_tokens,
            text=completion.rest(),
            finish_reason=completion.finish_reason,
            usage=self._usage(),
        )

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.half.tokens),
            completion_tokens=self._completion.num_tokens,
            cached_tokens=self._reported_cached_tokens(),
        )

    def _reported_cached_tokens(self) -> int:
        """After a hand-over between decode workers, what the first one found: the client's request was served then."""
        return self.half.cached_tokens if self.half.known else self._cached_tokens

    def _new_outbox(self) -> Outbox:
        half, config = self.half, self._parts.config
        return Outbox(
            self._parts.bus,
            half.reply,
            request_id=half.request_id,
            encoding=half.encoding,
            headers=endpoint.seal(),
            first_seq=len(half.known),
            max_unsent=config.max_unsent_tokens,
            # A reader drops what it has seen before, which it can only do with whole events: after a change of
            # workers, each token is one.
            max_batch=1 if half.known or half.attempt > 1 else MAX_BATCH_TOKENS,
            deadline_ns=self._deadline_ns,
            receipt=half.receipt,
            is_held=Claims(self._parts.standing, half).is_held,
            on_dropped=lambda: self.job.stop(DROPPED),
            log=self._log,
        )

    def _leases(self) -> LeaseSet:
        config = self._parts.config
        return LeaseSet(
            self._parts.pool,
            self.half.request_id,
            tenant=self.half.tenant,
            model=self.half.model,
            root=self.half.root,
            makers=self._parts.sequences.makers,
            lease_s=config.lease_s,
            deadline_ns=self._deadline_ns,
            timeout_s=config.pool_timeout_s,
        )

    async def _tell_conductor(self, error: Error | None) -> None:
        message = HalfEnded(
            request_id=self.half.request_id,
            transfer_id=self.half.transfer_id,
            worker=self._parts.worker,
            role=self._parts.config.role,
            error=error,
            num_reused_tokens=self._num_loaded_tokens,
            num_computed_tokens=self._num_computed_tokens,
            num_generated_tokens=self._completion.num_tokens - len(self.half.known),
            duration_s=self._times.since_accepted_s(),
            # Where another worker had begun, the first token here wasn't the request's.
            ttft_s=None if self.half.known else self._times.first_s(),
            tbt_s=self._times.mean_gap_s(),
            usage=self._usage(),
        )
        try:
            await endpoint.announce(self._parts.bus, subjects.ended(self.half.conductor), message)
        except BusError as failure:
            self._log.warning("the conductor can't be told that the half has ended", error=str(failure))

    def _internal(self, error: Exception) -> Error:
        self._log.error("half failed", exc_info=error)
        return Error(code=ErrorCode.INTERNAL, message="decode failed; the worker's log has the details")

    def _is_provided(self) -> bool:
        """Whether KV comes through the pool: from prefill, or computed here as prefill would."""
        return self.half.prefill_worker is not None or self._computes_prompt()

    def _computes_prompt(self) -> bool:
        """Whether this worker does what prefill does, for its own pool."""
        return self.half.prefill_worker is None and self._parts.config.role is Role.COLOCATED

    def _is_before_tokens(self) -> bool:
        return self.state in (HalfState.QUEUED, HalfState.WAITING_KV, HalfState.LOADING)
