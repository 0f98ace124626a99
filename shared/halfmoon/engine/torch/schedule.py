"""What one step computes. Pure.

Every sequence that decodes gets its one token; prompt tokens fill up the rest, first come first served, up to a bound
that is lower while others decode, so that a long prompt doesn't make them wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Want:
    """What a sequence still has to compute."""

    seq_id: str
    start: int
    """First position whose KV is missing."""
    stop: int
    """Position after the last one wanted now."""
    is_decoding: bool
    """Past its prompt: one token at a time, each step."""


@dataclass(frozen=True, slots=True)
class Part:
    """Positions `[start, stop)` of one sequence, in this step."""

    seq_id: str
    start: int
    stop: int


def plan_step(wants: Sequence[Want], *, prefill_step_tokens: int, mixed_step_tokens: int, max_batch: int) -> list[Part]:
    """The parts of the next step, in the order of `wants` (oldest first). Empty only where nothing is wanted."""
    decoding = [want for want in wants if want.is_decoding][:max_batch]
    parts = [Part(want.seq_id, want.start, want.stop) for want in decoding]
    budget = mixed_step_tokens if decoding else prefill_step_tokens
    for want in wants:
        if want.is_decoding or budget == 0:
            continue
        stop = min(want.stop, want.start + budget)
        parts.append(Part(want.seq_id, want.start, stop))
        budget -= stop - want.start
    return parts
