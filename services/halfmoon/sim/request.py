"""A request's way through the simulated cluster: what it asks for, and when what happened to it."""

from dataclasses import dataclass
from enum import StrEnum

from halfmoon.schemas.ids import ChunkKey, RequestId, WorkerId


class Outcome(StrEnum):
    FINISHED = "finished"
    REJECTED = "rejected"
    """At arrival: nothing was computed."""
    WASTED = "wasted"
    """After prefill: its decode worker couldn't take it any more."""


@dataclass(slots=True, eq=False)
class SimRequest:
    request_id: RequestId
    number: int
    at_s: float
    num_tokens: int
    num_completion: int
    keys: tuple[ChunkKey, ...]
    """Of the prompt's whole chunks."""
    max_tokens: int
    """What it asks for, which is all that schedulers know of its length."""
    group: str = ""

    prefill: WorkerId | None = None
    """Where it was prefilled. None: nowhere, or by its decode worker."""
    num_reused: int = 0
    """Chunks that were there when its prefill began."""
    prefill_s: float = 0.0
    """What computing the rest takes."""
    prefill_end_s: float | None = None
    kv_at_s: float | None = None
    """When its KV was at its decode worker."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    outcome: Outcome | None = None
    reason: str = ""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.at_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.last_token_s is None else self.last_token_s - self.at_s

    @property
    def tbt_s(self) -> float | None:
        """Mean time between its tokens; None where it has one alone."""
        if self.first_token_s is None or self.last_token_s is None or self.num_completion < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_completion - 1)
