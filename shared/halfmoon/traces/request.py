"""A request as traces know it: when it came and how long it was, and its blocks where the trace has hashes of them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    at_ms: float
    """Since the trace's begin."""
    prompt_tokens: int
    completion_tokens: int | None = None
    """None: not known."""
    blocks: tuple[int, ...] | None = None
    """Hashes of the prompt's blocks, each with all before it. The last may be a partial one. None: not known."""
    group: str = ""
    """Prompts of different groups (tenants, models) share nothing."""
