"""The engine contract: tokens into KV, and KV into tokens.

An engine sees the pool only as memory: the service has acquired what is cached and reserved what will be written before
it calls. The engine copies payloads between those slots and its own paged KV; it never talks to the bus or the pool.

Lifecycle, and what each side promises:

1. `start()` loads the weights and returns the `ModelCard`. Called once. It reports progress in 0..1.
2. `open(spec)` claims KV blocks for a whole sequence (`max_tokens` of it). It is synchronous and all-or-nothing:
   `EngineFull` leaves nothing behind. The sequence id may be used again only after `close`.
3. `hot(...)` says how much of the prompt the engine's own prefix cache holds, and keeps that for the sequence.
4. `load(...)` copies cached chunks in, in any order. The caller keeps each payload valid until `load` has returned.
5. `prefill(...)` computes the KV of positions `[start, stop)` in bounded steps and writes each finished chunk to its
   sink before yielding it. The caller keeps the sinks valid until the iterator has ended or `close` has returned.
6. `decode(...)` computes what is still missing of the prompt (always at least its last token), then samples.
7. `close(seq_id)` aborts whatever runs for the sequence, and returns only when no thread of the engine can touch its
   payloads, sinks or blocks any more. Idempotent, prompt (one step at most), safe in any state and from `finally`.
8. `stop()` closes every sequence and frees the model. Idempotent.

Positions and who owns them, for a prompt of n tokens and chunks of c (k = n // c whole chunks):

    [0, c) [c, 2c) ... [(k-1)c, kc)   whole chunks: shared, keyed by content, stay in the pool
    [kc, n-1)                         the partial chunk: handed over under the transfer id, never registered
    n-1                               the last token: decode computes it, always, so that sampling lives in one place
"""

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from halfmoon.schemas.ids import ChunkKey
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.requests import Sampling, TokenLogprob


class EngineError(Exception):
    """Base of what an engine raises on purpose."""


class EngineFull(EngineError):
    """No blocks for this sequence now; some are freed when another ends."""

    def __init__(self, needed_tokens: int, free_tokens: int) -> None:
        super().__init__(f"needs KV for {needed_tokens} tokens, {free_tokens} are free")
        self.needed_tokens = needed_tokens
        self.free_tokens = free_tokens


class ModelUnsupported(EngineError):
    """The model can't be served by this engine; the message says why and what to use instead."""


class LoadFailed(EngineError):
    """A payload could not be copied in. Its positions aren't loaded; the sequence goes on without them."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"chunk {index} could not be loaded: {reason}")
        self.index = index


class SequenceClosed(EngineError):
    """The sequence was closed while, or before, something ran for it."""


@dataclass(frozen=True, slots=True)
class DecodeSpec:
    """How to generate: `Sampling` holds what the user asked for."""

    sampling: Sampling
    seed: int
    """Always set: the conductor draws one where the user gave none, so that a continuation elsewhere is the same."""
    num_known: int = 0
    """Completion tokens that are already part of `SequenceSpec.tokens`: the next one sampled has this position."""
    stop_tokens: frozenset[int] = field(default_factory=frozenset)
    """End-of-sequence ids. Reaching one ends the iterator; that token is yielded too."""


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """One sequence as the engine will hold it."""

    seq_id: str
    tokens: Sequence[int]
    """The whole prompt. (For a continuation: prompt and the tokens that are already known.)"""
    max_tokens: int
    """KV to hold at most, in tokens: for prefill the prompt, for decode prompt and completion."""
    decode: DecodeSpec | None = None
    """How `decode` is to generate; None where it won't be called."""
    num_loadable: int | None = None
    """Positions `[0, num_loadable)` may be loaded, no others. None: all but the last token's. An engine that schedules
    by itself has to know before the first chunk is there."""
    has_sinks: bool = False
    """Whether `prefill` will be called."""
    root: bytes = b""
    """Root of the chunk keys (`halfmoon.chunks.keys.Namespace`). What the engine caches by itself is shared only
    between sequences of one root, so that tenants stay apart there too."""


@dataclass(frozen=True, slots=True)
class ChunkSink:
    """Where one computed chunk goes."""

    index: int
    """Chunk number in the prompt: it covers positions `[index * chunk_tokens, index * chunk_tokens + num_tokens)`."""
    num_tokens: int
    payload: memoryview
    """Writable, exactly `ModelCard.payload_bytes(num_tokens)` bytes."""


@dataclass(frozen=True, slots=True)
class ChunkWritten:
    """A sink that now holds its chunk's KV. Chunks are yielded in order of their index."""

    index: int
    started_ns: int
    """Unix time at which the step that began this chunk started."""
    finished_ns: int
    is_hot: bool = False
    """It was copied out of the engine's prefix cache, not computed."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One generated token."""

    position: int
    """Its index in the completion, counted from 0."""
    token: int
    logprob: TokenLogprob | None = None
    """Only where the request asked for logprobs."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for heartbeats and metrics."""

    running: int
    """Sequences that some step works on."""
    waiting: int
    """Sequences open and not yet in a step."""
    free_tokens: int
    total_tokens: int
    steps: int = 0
    prefill_tokens_per_s: float | None = None
    """Recent speed of prompt computation; None before the first."""
    decode_step_s: float | None = None
    """Recent time of a decode step; None before the first."""


@dataclass(frozen=True, slots=True)
class HotChanges:
    """What came into and went out of the engine's own prefix cache since it was asked last."""

    added: frozenset[ChunkKey] = frozenset()
    removed: frozenset[ChunkKey] = frozenset()
    is_reset: bool = False
    """What was told before doesn't count any more: `added` is all that is there."""


class Engine(Protocol):
    """See the module's docstring for the lifecycle. All methods are called from one event loop."""

    @property
    def card(self) -> ModelCard:
        """The served model. Valid after `start`."""
        ...

    async def start(self, progress: Callable[[float], None] = ...) -> ModelCard: ...

    def open(self, spec: SequenceSpec) -> None:
        """Claim blocks. Raises `EngineFull`, or ValueError where the spec can never fit."""
        ...

    async def hot(self, seq_id: str) -> int:
        """Positions `[0, n)` that the engine holds already, from sequences before: they needn't be loaded.

        0 for an engine without a prefix cache. Raises `SequenceClosed`.
        """
        ...

    def hot_changes(self) -> HotChanges:
        """Chunks that are hot now and weren't when this was last asked, and the reverse. Asked by one caller."""
        ...

    def forget(self, roots: Collection[bytes] | None = None) -> int:
        """Let no sequence that is opened from now on find what the prefix cache holds of these roots, or (None) of any;
        the chunks known to be there.

        Those that are open go on. What they leave behind isn't found either.
        """
        ...

    async def load(self, seq_id: str, index: int, num_tokens: int, payload: memoryview) -> None:
        """Copy one chunk's payload (`ModelCard.payload_bytes(num_tokens)` bytes) into the sequence's KV.

        What is hot already is left as it is. Raises `LoadFailed`, `SequenceClosed`; ValueError where the size or place
        is wrong.
        """
        ...

    def prefill(self, seq_id: str, start: int, stop: int, sinks: Sequence[ChunkSink]) -> AsyncIterator[ChunkWritten]:
        """Compute positions `[start, stop)`, where all before `start` is loaded; `start` is a chunk's first position.

        The sinks cover `[start, stop)` without gaps, in order. Raises `SequenceClosed`.
        """
        ...

    def decode(self, seq_id: str, num_computed: int) -> AsyncIterator[Sampled]:
        """Generate as `SequenceSpec.decode` says, where `[0, num_computed)` is loaded or hot.

        `num_computed < len(tokens)`. Ends after a stop token or `sampling.max_tokens` tokens. The consumer may stop
        iterating at any time and call `close`. Raises `SequenceClosed`.
        """
        ...

    async def close(self, seq_id: str) -> None: ...

    def stats(self) -> EngineStats: ...

    async def stop(self) -> None: ...
