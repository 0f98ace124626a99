"""Prompts of a trace as `hit_rate` replays them: blocks, of which the last may be partly filled."""

from dataclasses import dataclass
from pathlib import Path

from halfmoon.traces import TraceError, open_trace


@dataclass(frozen=True, slots=True)
class TracePrompt:
    at_ns: int
    blocks: tuple[int, ...]
    """Different from each other."""
    last_is_full: bool


def read_prompts(path: Path) -> list[TracePrompt]:
    """The trace's prompts in their order. Raises `TraceError`, also for a trace that has lengths alone."""
    trace = open_trace(path)
    if trace.block_tokens is None:
        raise TraceError(f"{path} has lengths of prompts alone, no hashes of them: hits can't be known")
    prompts = [
        TracePrompt(
            at_ns=round(request.at_ms * 1_000_000),
            blocks=request.blocks or (),
            last_is_full=len(request.blocks or ()) * trace.block_tokens <= request.prompt_tokens,
        )
        for request in trace.requests
    ]
    if not prompts:
        raise TraceError(f"{path} holds no prompts: expected a line for each")
    return prompts
