"""The life of a decode half, as data; and what is known of its KV on the way."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from halfmoon.chunks.plan import PlannedChunk
from halfmoon.machine import Table
from halfmoon.schemas.kv_tier import ChunkSource
from halfmoon.schemas.splits import KvFailed, KvReady


class HalfState(Enum):
    QUEUED = "queued"
    WAITING_KV = "waiting_kv"
    LOADING = "loading"
    """Announced chunks are pulled and copied into the engine."""
    RECOMPUTING = "recomputing"
    """The engine computes the part of the prompt that could not be had."""
    GENERATING = "generating"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class HalfEvent(Enum):
    START = "start"
    ANNOUNCED = "announced"
    LOADED = "loaded"
    COMPLETE = "complete"
    """All of the prompt's chunks are in the engine."""
    GIVE_UP = "give up"
    """Some won't come: what follows the loaded prefix is computed here."""
    FIRST_TOKEN = "first token"
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "cancel"


_ALIVE = (
    HalfState.QUEUED,
    HalfState.WAITING_KV,
    HalfState.LOADING,
    HalfState.RECOMPUTING,
    HalfState.GENERATING,
)

HALF_TABLE: Table[HalfState, HalfEvent] = {
    (HalfState.QUEUED, HalfEvent.START): HalfState.WAITING_KV,
    (HalfState.WAITING_KV, HalfEvent.ANNOUNCED): HalfState.LOADING,
    (HalfState.LOADING, HalfEvent.LOADED): HalfState.WAITING_KV,
    (HalfState.WAITING_KV, HalfEvent.COMPLETE): HalfState.GENERATING,
    (HalfState.WAITING_KV, HalfEvent.GIVE_UP): HalfState.RECOMPUTING,
    (HalfState.RECOMPUTING, HalfEvent.FIRST_TOKEN): HalfState.GENERATING,
    (HalfState.GENERATING, HalfEvent.FINISH): HalfState.FINISHED,
    (HalfState.QUEUED, HalfEvent.FINISH): HalfState.FINISHED,
    **{(state, HalfEvent.FAIL): HalfState.FAILED for state in _ALIVE},
    **{(state, HalfEvent.CANCEL): HalfState.CANCELLED for state in _ALIVE},
}


@dataclass(slots=True)
class KvProgress:
    """What is known of one transfer: announced, loaded, lost. Chunks are loaded in order, from the first on."""

    chunks: Sequence[PlannedChunk]
    """The prompt as this worker cuts it."""
    sources: dict[int, ChunkSource] = field(default_factory=dict)
    """Where each announced chunk can be pulled from: the latest announcement counts."""
    num_loaded: int = 0
    lost: str | None = None
    """Why the next chunk can't be had."""
    given_up: str | None = None
    """Why no more announcements are waited for."""
    cached_tokens: int = 0
    """Prompt tokens that prefill found in the pool, or that this engine had."""

    @property
    def num_loaded_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks[: self.num_loaded])

    def hot(self, num_tokens: int) -> Sequence[PlannedChunk]:
        """Take in that the engine holds `[0, num_tokens)` already; the chunks that needn't be loaded for it."""
        end = 0
        for place, chunk in enumerate(self.chunks):
            end += chunk.num_tokens
            if end > num_tokens:
                break
            self.num_loaded = place + 1
        self.cached_tokens = self.num_loaded_tokens
        return self.chunks[: self.num_loaded]

    def announce(self, message: KvReady) -> None:
        """Take an announcement in; what this worker didn't plan for means that the two cut the prompt differently."""
        if message.num_chunks != len(self.chunks):
            self.given_up = f"prefill cuts the prompt into {message.num_chunks} chunks, not {len(self.chunks)}"
            return
        self.cached_tokens = max(self.cached_tokens, message.cached_tokens)
        for ready in message.chunks:
            planned = self.chunks[ready.index] if 0 <= ready.index < len(self.chunks) else None
            if planned is None or (planned.key, planned.num_bytes) != (ready.key, ready.num_bytes):
                self.given_up = f"prefill announced a chunk {ready.index} that is not this prompt's"
                return
            self.sources[ready.index] = message.source

    def fail(self, message: KvFailed) -> None:
        self.given_up = message.error.message
