"""Decisions of the decode service. Pure."""

from dataclasses import dataclass

from halfmoon.chunks.plan import PlannedChunk
from halfmoon.decode.state import KvProgress
from halfmoon.schemas.kv_tier import ChunkSource
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.splits import DecodeHalf
from halfmoon.schemas.wire import Error, ErrorCode
from halfmoon.worker.admission import Load, busy, unservable


@dataclass(frozen=True, slots=True)
class Pull:
    """Load these chunks next."""

    chunks: tuple[tuple[PlannedChunk, ChunkSource], ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to load now, and more may come."""


@dataclass(frozen=True, slots=True)
class Generate:
    """Everything is loaded."""


@dataclass(frozen=True, slots=True)
class Recompute:
    """Go on with the loaded prefix; the rest won't come."""

    reason: str


KvStep = Pull | Wait | Generate | Recompute


def next_step(progress: KvProgress) -> KvStep:
    """What to do about a prompt's KV.

    What is announced is loaded also after prefill has failed: it is there already. But a chunk that can't be had makes
    all behind it useless, since KV is loaded without gaps.
    """
    if progress.num_loaded == len(progress.chunks):
        return Generate()
    if progress.lost is not None:
        return Recompute(progress.lost)
    run: list[tuple[PlannedChunk, ChunkSource]] = []
    for chunk in progress.chunks[progress.num_loaded :]:
        source = progress.sources.get(chunk.index)
        if source is None:
            break
        run.append((chunk, source))
    if run:
        return Pull(tuple(run))
    if progress.given_up is not None:
        return Recompute(progress.given_up)
    return Wait()


def refusal(half: DecodeHalf, card: ModelCard, load: Load, kv_tokens: int) -> Error | None:
    """Why this half is turned away; None where it is taken. What can never work is said before what can't work now."""
    wrong = unservable(card, half.model, half.tokens, kv_tokens)
    if wrong is not None:
        return wrong
    limit = min(card.max_model_tokens, kv_tokens) - len(half.tokens)
    if half.sampling.max_tokens is not None and half.sampling.max_tokens > limit:
        return Error(
            code=ErrorCode.INVALID_REQUEST,
            message=f"max_tokens is {half.sampling.max_tokens}; after a prompt of {len(half.tokens)} tokens, "
            f"at most {limit} fit on this worker",
        )
    return busy(load)


def completion_limit(half: DecodeHalf, card: ModelCard, kv_tokens: int) -> int:
    """Completion tokens at most: as asked, or as many as fit."""
    if half.sampling.max_tokens is not None:
        return half.sampling.max_tokens
    return min(card.max_model_tokens, kv_tokens) - len(half.tokens)


def num_computed(num_loaded_tokens: int, num_tokens: int) -> int:
    """Where the engine starts: behind what is loaded, but never behind the last token, which it needs for sampling."""
    return min(num_loaded_tokens, num_tokens - 1)


def is_lost(silent_s: float, lost_after_s: float, grace_s: float) -> bool:
    """Whether a prefill worker that has been silent for so long is given up: lost, and nobody took its half over."""
    return silent_s > lost_after_s + grace_s
