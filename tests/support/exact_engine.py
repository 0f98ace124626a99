"""An engine whose KV is checkable: each position's KV is a digest of all tokens up to it.

So tokens generated from wrong KV are wrong tokens: what is loaded, computed and handed over can be told from what is
not. A test may hold the engine at any step.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field

from halfmoon.engine.contract import (
    ChunkSink,
    ChunkWritten,
    EngineFull,
    EngineStats,
    HotChanges,
    Sampled,
    SequenceClosed,
    SequenceSpec,
)
from halfmoon.schemas.ids import ModelName
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.requests import TokenLogprob, TopLogprob

KV_BYTES_PER_TOKEN = 64
CHUNK_TOKENS = 8
VOCAB_SIZE = 402

Choose = Callable[[int], int | None]
"""The token at a position of the completion; None: what the KV says."""


def position_kv(before: bytes, token: int) -> bytes:
    """The KV of one position, from that of the one before it (empty at the start)."""
    return hashlib.sha512(before + token.to_bytes(4, "little")).digest()


def sample(kv: bytes, seed: int, position: int) -> int:
    """A token between 2 and 257: the single bytes of the tiny tokenizer, none of its special tokens."""
    digest = hashlib.sha256(kv + seed.to_bytes(8, "little", signed=True) + position.to_bytes(4, "little")).digest()
    return 2 + digest[0]


def reference(prompt: Sequence[int], num_tokens: int, seed: int) -> list[int]:
    """What the engine generates where all KV is right."""
    kv = b""
    for token in prompt:
        kv = position_kv(kv, token)
    out: list[int] = []
    for position in range(num_tokens):
        out.append(sample(kv, seed, position))
        kv = position_kv(kv, out[-1])
    return out


@dataclass
class _Sequence:
    spec: SequenceSpec
    kv: dict[int, bytes] = field(default_factory=dict)
    closed: asyncio.Event = field(default_factory=asyncio.Event)


class ExactEngine:
    def __init__(self, total_tokens: int = 4096, choose: Choose | None = None) -> None:
        self.total_tokens = total_tokens
        self.choose = choose or (lambda position: None)
        self.gates: dict[str, asyncio.Event] = {}
        """Steps of this kind (`load`, `prefill`, `decode`) wait until its event is set."""
        self.at: dict[str, int] = {}
        """How many steps of a kind have begun."""
        self.broken: Exception | None = None
        """Raised by the next step."""
        self.prefilled: list[tuple[int, int]] = []
        self.decoded_from: list[int] = []
        self.num_loads = 0
        self.num_hot = 0
        self.changes: deque[HotChanges] = deque()
        self.forgotten: list[Collection[bytes] | None] = []
        """Roots, as `forget` was asked."""
        """What `hot_changes` answers, one after the other."""
        self.started = False
        self._sequences: dict[str, _Sequence] = {}
        self._clock_ns = 1_000

    @property
    def card(self) -> ModelCard:
        return ModelCard(
            name=ModelName("exact"),
            engine="sim",
            fingerprint="00",
            kv_dtype="float32",
            layout="exact.v1",
            kv_bytes_per_token=KV_BYTES_PER_TOKEN,
            chunk_tokens=CHUNK_TOKENS,
            max_model_tokens=1024,
            vocab_size=VOCAB_SIZE,
        )

    async def start(self, progress: Callable[[float], None] = lambda share: None) -> ModelCard:
        progress(0.5)
        self.started = True
        return self.card

    def open(self, spec: SequenceSpec) -> None:
        assert spec.seq_id not in self._sequences
        free = self.stats().free_tokens
        if spec.max_tokens > self.total_tokens:
            raise ValueError(f"{spec.max_tokens} tokens never fit")
        if spec.max_tokens > free:
            raise EngineFull(spec.max_tokens, free)
        self._sequences[spec.seq_id] = _Sequence(spec)

    async def hot(self, seq_id: str) -> int:
        """As a prefix cache would: `num_hot` tokens of any prompt, rightly computed."""
        sequence = self._sequence(seq_id)
        num_hot = min(self.num_hot, len(sequence.spec.tokens) - 1)
        self._compute(sequence, 0, num_hot)
        return num_hot

    def hot_changes(self) -> HotChanges:
        return self.changes.popleft() if self.changes else HotChanges()

    def forget(self, roots: Collection[bytes] | None = None) -> int:
        self.forgotten.append(roots)
        num_chunks, self.num_hot = self.num_hot // CHUNK_TOKENS, 0
        self.changes.append(HotChanges(is_reset=True))
        return num_chunks

    async def load(self, seq_id: str, index: int, num_tokens: int, payload: memoryview) -> None:
        assert len(payload) == num_tokens * KV_BYTES_PER_TOKEN
        sequence = self._sequence(seq_id)
        await self._step("load", sequence)
        for offset in range(num_tokens):
            at = offset * KV_BYTES_PER_TOKEN
            sequence.kv[index * CHUNK_TOKENS + offset] = bytes(payload[at : at + KV_BYTES_PER_TOKEN])
        self.num_loads += 1

    async def prefill(
        self, seq_id: str, start: int, stop: int, sinks: Sequence[ChunkSink]
    ) -> AsyncIterator[ChunkWritten]:
        sequence = self._sequence(seq_id)
        assert start == sinks[0].index * CHUNK_TOKENS
        assert stop == start + sum(sink.num_tokens for sink in sinks)
        self.prefilled.append((start, stop))
        for sink in sinks:
            await self._step("prefill", sequence)
            started_ns = self._now_ns()
            begin = sink.index * CHUNK_TOKENS
            self._compute(sequence, begin, begin + sink.num_tokens)
            sink.payload[:] = b"".join(sequence.kv[begin + offset] for offset in range(sink.num_tokens))
            yield ChunkWritten(sink.index, started_ns, self._now_ns())

    async def decode(self, seq_id: str, num_computed: int) -> AsyncIterator[Sampled]:
        sequence = self._sequence(seq_id)
        spec = sequence.spec.decode
        assert spec is not None
        tokens = list(sequence.spec.tokens)
        assert 0 <= num_computed < len(tokens)
        self.decoded_from.append(num_computed)
        self._compute(sequence, num_computed, len(tokens))
        kv = sequence.kv[len(tokens) - 1]
        assert spec.sampling.max_tokens is not None
        for position in range(spec.num_known, spec.sampling.max_tokens):
            await self._step("decode", sequence)
            chosen = self.choose(position)
            token = sample(kv, spec.seed, position) if chosen is None else chosen
            logprob = None
            if spec.sampling.logprobs is not None:
                top = tuple(TopLogprob(token=token, text="", logprob=-0.5) for _ in range(spec.sampling.logprobs))
                logprob = TokenLogprob(token=token, text="", logprob=-0.5, top=top)
            yield Sampled(position, token, logprob)
            if token in spec.stop_tokens:
                return
            kv = position_kv(kv, token)

    async def close(self, seq_id: str) -> None:
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            sequence.closed.set()

    def stats(self) -> EngineStats:
        claimed = sum(sequence.spec.max_tokens for sequence in self._sequences.values())
        return EngineStats(
            running=len(self._sequences),
            waiting=0,
            free_tokens=self.total_tokens - claimed,
            total_tokens=self.total_tokens,
        )

    async def stop(self) -> None:
        for seq_id in list(self._sequences):
            await self.close(seq_id)

    def hold(self, kind: str) -> asyncio.Event:
        """Stop at the next step of this kind, until the event is set."""
        return self.gates.setdefault(kind, asyncio.Event())

    def _sequence(self, seq_id: str) -> _Sequence:
        if seq_id not in self._sequences:
            raise SequenceClosed(seq_id)
        return self._sequences[seq_id]

    async def _step(self, kind: str, sequence: _Sequence) -> None:
        self.at[kind] = self.at.get(kind, 0) + 1
        await asyncio.sleep(0)
        if kind in self.gates:
            await self.gates[kind].wait()
        if self.broken is not None:
            raise self.broken
        if sequence.closed.is_set():
            raise SequenceClosed(sequence.spec.seq_id)

    def _compute(self, sequence: _Sequence, start: int, stop: int) -> None:
        for position in range(start, stop):
            before = sequence.kv[position - 1] if position else b""
            sequence.kv[position] = position_kv(before, sequence.spec.tokens[position])

    def _now_ns(self) -> int:
        self._clock_ns += 1_000
        return self._clock_ns
