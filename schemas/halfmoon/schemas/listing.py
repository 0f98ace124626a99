"""Which chunks a pool holds, and how they are used: the question, and a page of the answer."""

from enum import StrEnum

from halfmoon.schemas.chunks import ChunkMeta, Tier
from halfmoon.schemas.ids import ChunkKey
from halfmoon.schemas.orders import Selection
from halfmoon.schemas.wire import Message


class ChunkOrder(StrEnum):
    """By what a list of chunks is sorted: by key ascending, by all else descending."""

    KEY = "key"
    HITS = "hits"
    SIZE = "size"
    AGE = "age"
    IDLE = "idle"


class ListChunks(Message, frozen=True, tag="kvtier.list.v1"):
    """Which chunks are here, and how are they used? One page."""

    selection: Selection = Selection(everything=True)
    tier: Tier | None = None
    order: ChunkOrder = ChunkOrder.KEY
    ends_only: bool = False
    """Only the last chunk of each cached prefix."""
    after: ChunkKey | None = None
    """Ordered by key: the last key of the page before."""
    limit: int = 1000
    """At most 4,096."""


class HeldChunk(Message, frozen=True):
    meta: ChunkMeta
    """With the hits and the time of the last use on this node."""
    num_leases: int = 0
    is_pinned: bool = False


class ChunkList(Message, frozen=True, tag="kvtier.chunks.v1"):
    epoch: int
    chunks: tuple[HeldChunk, ...]
    num_matching: int
    """All that the question means, from its `after` on."""
