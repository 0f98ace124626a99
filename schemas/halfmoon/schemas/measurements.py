"""How long things took, as workers and pools measured it: what conductors fit their cost models to. In heartbeats."""

from halfmoon.schemas.ids import NodeId
from halfmoon.schemas.wire import Message


class PrefillSample(Message, frozen=True):
    """One prompt that was computed. Time that the engine gave to earlier prompts isn't in it."""

    num_tokens: int
    num_reused: int
    """Of these, the first that were not computed: from the pool, or hot."""
    duration_s: float


class DecodeSample(Message, frozen=True):
    """The time between two tokens of a request, on average over some of them."""

    batch: int
    """Requests that were decoded together."""
    context_tokens: int
    """Prompts and completions so far, of all of them in sum."""
    step_s: float


class PullSample(Message, frozen=True):
    """One batch of chunks that was moved between two pools, or read from this node's own SSD."""

    source: NodeId
    """The node that sent this itself, where it was a read from its SSD."""
    num_bytes: int
    duration_s: float
    num_bytes_ahead: int = 0
    """Already on their way to this node when it began: they shared its link."""
