"""What conductors and pools say to each other about copies: which to make, and which may go.

conductor ── Replicate ──▶ kv-tier: bring these here, when there is nothing better to do
kv-tier ── AskSurplus ──▶ conductors: which of these do others hold too?
"""

from enum import StrEnum

from halfmoon.schemas.ids import ChunkKey, NodeId
from halfmoon.schemas.kv_tier import WantedChunk
from halfmoon.schemas.wire import Error, Message


class Cause(StrEnum):
    """Why a chunk is brought to a node that nobody has asked for it."""

    DEMAND = "demand"
    """It is used so often that one more copy should serve it."""
    PINNED = "pinned"
    """It is to be kept, so it is kept in more than one place."""
    OVERLOAD = "overload"
    """The node that holds it has too much to do: requests for it are to go elsewhere too."""
    PREFETCH = "prefetch"
    """It is likely to be asked for here soon."""


class Replicate(Message, frozen=True, tag="kvtier.replicate.v1"):
    """Bring these chunks here and keep them. On `halfmoon.kvtier.<node>.replicate`; answered before anything moves.

    They are pulled in this order, while no request waits for a pull, and given up where that doesn't happen soon.
    """

    chunks: tuple[WantedChunk, ...]
    """With their sources; at most 1,024."""
    cause: Cause


class Replicating(Message, frozen=True, tag="kvtier.replicating.v1"):
    """What is to become of chunks that were to be replicated."""

    num_here: int
    """They are in this pool already, or on their way."""
    num_queued: int
    """The rest has been turned away: the queue is full, or too much was brought that nobody has used yet."""


class AskSurplus(Message, frozen=True, tag="conductor.asksurplus.v1"):
    """Which of these chunks are on enough other nodes? On `halfmoon.conductor.surplus`, to any one conductor."""

    node: NodeId
    """Who asks. It holds them all."""
    keys: tuple[ChunkKey, ...]
    """At most 1,024."""


class Surplus(Message, frozen=True, tag="conductor.surplus.v1"):
    """Those that the node may let go first. Of all holders of a chunk, those who must keep theirs are the same for
    whoever asks."""

    keys: tuple[ChunkKey, ...]


CopiesReply = Replicating | Surplus | Error
