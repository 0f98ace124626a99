"""The simulated engine: keeps a model's time, not its mind.

What it takes is counted from where the work before ended, not from when the event loop came round to ask for more: as a
GPU's own steps follow on each other, whatever goes on beside. So however late a chunk or a token is fetched, the next
one isn't.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from halfmoon.engine.checks import check_decode, check_load, check_sinks, check_spec
from halfmoon.engine.contract import (
    ChunkSink,
    ChunkWritten,
    EngineError,
    EngineFull,
    EngineStats,
    HotChanges,
    Sampled,
    SequenceClosed,
    SequenceSpec,
)
from halfmoon.engine.sim.timing import Timing
from halfmoon.engine.sim.tokens import KV_BYTES_PER_TOKEN, completion_seed, completion_token, prompt_kv
from halfmoon.models import ModelFolder
from halfmoon.schemas.ids import ModelName
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.requests import TokenLogprob, TopLogprob

SIM_KV_BYTES_PER_TOKEN = KV_BYTES_PER_TOKEN
LAYOUT = "sim.v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimEngineConfig:
    model: Path
    """Gives tokenizer, vocabulary and context length; its weights aren't read and needn't be there."""
    name: str
    chunk_tokens: int = 256
    kv_tokens: int = 16_384
    prefill_tokens_per_s: float = 20_000.0
    decode_step_s: float = 0.02
    load_s: float = 0.0

    @property
    def timing(self) -> Timing:
        """What it sleeps by; the simulator calculates with the same."""
        return Timing.constant(prefill_tokens_per_s=self.prefill_tokens_per_s, decode_step_s=self.decode_step_s)


@dataclass(slots=True)
class _Sequence:
    spec: SequenceSpec
    kv: bytearray
    """What was loaded and computed of the prompt's KV."""
    is_running: bool = False
    closed: asyncio.Event = field(default_factory=asyncio.Event)


class SimEngine:
    """See `halfmoon.engine.contract.Engine`. Prompts are computed one after the other; who decodes shares steps."""

    def __init__(self, config: SimEngineConfig) -> None:
        self._config = config
        self._timing = config.timing
        self._decoding: dict[str, int] = {}
        """Sequences that are being decoded, with their contexts' tokens."""
        self._sequences: dict[str, _Sequence] = {}
        self._free_tokens = config.kv_tokens
        self._computing = asyncio.Lock()
        self._computed_s = 0.0
        """When it was done with the last piece of a prompt."""
        self._step_begin_s = self._step_end_s = 0.0
        self._card: ModelCard | None = None
        self._num_steps = 0
        self._is_serving = False

    @property
    def card(self) -> ModelCard:
        if self._card is None:
            raise EngineError("the engine has not been started")
        return self._card

    async def start(self, progress: Callable[[float], None] = lambda done: None) -> ModelCard:
        config = self._config
        model = ModelFolder.open(config.model)
        for tenth in range(1, 11):
            await asyncio.sleep(config.load_s / 10)
            progress(tenth / 10)
        identity = f"sim\0{sorted(model.config.items())!r}"
        self._card = ModelCard(
            name=ModelName(config.name),
            engine="sim",
            fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
            kv_dtype="uint8",
            layout=LAYOUT,
            kv_bytes_per_token=KV_BYTES_PER_TOKEN,
            chunk_tokens=config.chunk_tokens,
            max_model_tokens=min(model.geometry.max_model_tokens, config.kv_tokens),
            vocab_size=model.geometry.vocab_size,
        )
        self._is_serving = True
        return self._card

    def open(self, spec: SequenceSpec) -> None:
        if not self._is_serving:
            raise EngineError("the engine has not been started, or was stopped")
        if spec.seq_id in self._sequences:
            raise ValueError(f"sequence {spec.seq_id} is open already")
        check_spec(spec, self._config.kv_tokens)
        if spec.max_tokens > self._free_tokens:
            raise EngineFull(spec.max_tokens, self._free_tokens)
        self._free_tokens -= spec.max_tokens
        self._sequences[spec.seq_id] = _Sequence(spec, bytearray(len(spec.tokens) * KV_BYTES_PER_TOKEN))

    async def hot(self, seq_id: str) -> int:
        """Always 0: it has no prefix cache."""
        self._get(seq_id)
        return 0

    def hot_changes(self) -> HotChanges:
        return HotChanges()

    def forget(self, roots: Collection[bytes] | None = None) -> int:
        return 0

    async def load(self, seq_id: str, index: int, num_tokens: int, payload: memoryview) -> None:
        sequence = self._get(seq_id)
        check_load(self.card, len(sequence.spec.tokens), index, num_tokens, payload)
        start = index * self._config.chunk_tokens
        sequence.kv[start * KV_BYTES_PER_TOKEN : (start + num_tokens) * KV_BYTES_PER_TOKEN] = payload

    async def prefill(
        self, seq_id: str, start: int, stop: int, sinks: Sequence[ChunkSink]
    ) -> AsyncIterator[ChunkWritten]:
        sequence = self._get_idle(seq_id)
        check_sinks(self.card, len(sequence.spec.tokens), start, stop, sinks)
        sequence.is_running = True
        asked_s = time.monotonic()
        try:
            async with self._computing:
                for sink in sinks:
                    first = sink.index * self._config.chunk_tokens
                    end = first + sink.num_tokens
                    started_ns = _unix_ns(max(asked_s, self._computed_s))
                    await self._compute(sequence, first, end, asked_s)
                    sink.payload[:] = sequence.kv[first * KV_BYTES_PER_TOKEN : end * KV_BYTES_PER_TOKEN]
                    yield ChunkWritten(sink.index, started_ns, _unix_ns(self._computed_s))
        finally:
            sequence.is_running = False

    async def decode(self, seq_id: str, num_computed: int) -> AsyncIterator[Sampled]:
        sequence = self._get_idle(seq_id)
        tokens = sequence.spec.tokens
        spec = check_decode(sequence.spec, num_computed)
        sequence.is_running = True
        ready_s = time.monotonic()
        try:
            if num_computed < len(tokens) - 1:
                async with self._computing:
                    await self._compute(sequence, num_computed, len(tokens) - 1, ready_s)
                    ready_s = self._computed_s
            prompt_bytes = (len(tokens) - spec.num_known) * KV_BYTES_PER_TOKEN
            # The last token of the prompt is part of the first step.
            self._fill(sequence, len(tokens) - 1, len(tokens))
            seed = completion_seed(memoryview(sequence.kv)[:prompt_bytes])
            last = spec.num_known + sequence.spec.max_tokens - len(tokens)
            limit = last if spec.sampling.max_tokens is None else min(last, spec.sampling.max_tokens)
            for position in range(spec.num_known, max(limit, spec.num_known + 1)):
                self._decoding[seq_id] = len(tokens) - spec.num_known + position
                ready_s = await self._step(sequence, ready_s)
                token = completion_token(seed, position, self.card.vocab_size)
                yield Sampled(position, token, _certain(token, spec.sampling.logprobs))
                if token in spec.stop_tokens:
                    return
        finally:
            sequence.is_running = False
            self._decoding.pop(seq_id, None)

    async def close(self, seq_id: str) -> None:
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            sequence.closed.set()
            self._free_tokens += sequence.spec.max_tokens

    def stats(self) -> EngineStats:
        running = sum(1 for sequence in self._sequences.values() if sequence.is_running)
        return EngineStats(
            running=running,
            waiting=len(self._sequences) - running,
            free_tokens=self._free_tokens,
            total_tokens=self._config.kv_tokens,
            steps=self._num_steps,
            prefill_tokens_per_s=self._config.prefill_tokens_per_s if self._num_steps else None,
            decode_step_s=self._config.decode_step_s if self._num_steps else None,
        )

    async def stop(self) -> None:
        self._is_serving = False
        for seq_id in list(self._sequences):
            await self.close(seq_id)

    async def _compute(self, sequence: _Sequence, start: int, stop: int, asked_s: float) -> None:
        """Make the KV of positions `[start, stop)`, and take its time, from when the piece before was done, or from
        `asked_s` if that is later."""
        end_s = max(asked_s, self._computed_s) + self._timing.prefill_s(stop, start)
        self._fill(sequence, start, stop)
        try:
            await self._sleep(sequence, end_s)
        finally:
            self._computed_s = min(end_s, time.monotonic())

    def _fill(self, sequence: _Sequence, start: int, stop: int) -> None:
        """KV of positions `[start, stop)`, from what stands before them."""
        at = start * KV_BYTES_PER_TOKEN
        before = bytes(sequence.kv[at - KV_BYTES_PER_TOKEN : at]) if start else bytes(KV_BYTES_PER_TOKEN)
        for kv in prompt_kv(sequence.spec.tokens[:stop], start, before):
            sequence.kv[at : at + KV_BYTES_PER_TOKEN] = kv
            at += KV_BYTES_PER_TOKEN

    async def _step(self, sequence: _Sequence, ready_s: float) -> float:
        """Be in the first step that begins at `ready_s` or after it; when that ends. Steps are shared by all that are
        ready at their beginnings, and follow on each other while any is."""
        while self._step_begin_s < ready_s < self._step_end_s:
            ready_s = self._step_end_s
            await self._sleep(sequence, ready_s)
        if ready_s < self._step_begin_s:
            # Whoever fetches a token late was in the step before this one none the less.
            end_s = self._step_begin_s
        elif ready_s == self._step_begin_s:
            end_s = self._step_end_s
        else:
            end_s = ready_s + self._timing.step_s(len(self._decoding), sum(self._decoding.values()))
            self._step_begin_s, self._step_end_s = ready_s, end_s
        await self._sleep(sequence, end_s)
        return end_s

    async def _sleep(self, sequence: _Sequence, until_s: float) -> None:
        """Sleep, or raise `SequenceClosed` as soon as the sequence is closed."""
        self._num_steps += 1
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            await asyncio.sleep(0)
        else:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(sequence.closed.wait(), left_s)
        # Asked in either case: it may have been closed at the very moment when the time was over.
        if sequence.closed.is_set():
            raise SequenceClosed(f"sequence {sequence.spec.seq_id} was closed")

    def _get(self, seq_id: str) -> _Sequence:
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            raise SequenceClosed(f"sequence {seq_id} is not open")
        return sequence

    def _get_idle(self, seq_id: str) -> _Sequence:
        sequence = self._get(seq_id)
        if sequence.is_running:
            raise ValueError(f"sequence {seq_id} is being computed already")
        return sequence


def _unix_ns(monotonic_s: float) -> int:
    return time.time_ns() - round((time.monotonic() - monotonic_s) * 1e9)


def _certain(token: int, num_top: int | None) -> TokenLogprob | None:
    """The simulated engine is always sure."""
    if num_top is None:
        return None
    top = (TopLogprob(token=token, text="", logprob=0.0),) if num_top else ()
    return TokenLogprob(token=token, text="", logprob=0.0, top=top)
