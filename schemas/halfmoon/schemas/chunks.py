"""Chunk metadata, and the events of the `CHUNKS` stream: ordered per node, each with the node's epoch.

An epoch is the Unix time in nanoseconds at which a node's pool started. What an older epoch held is gone.
"""

from enum import StrEnum

from halfmoon.schemas.ids import ChunkKey, ModelName, NodeId, RequestId, TenantId
from halfmoon.schemas.wire import Message


class Tier(StrEnum):
    HBM = "hbm"
    DRAM = "dram"
    SSD = "ssd"


class ChunkOutcome(StrEnum):
    """What happened to one chunk of one request at one place."""

    HIT_HBM = "hit_hbm"
    """The engine's own prefix cache held it: nothing was read from a pool."""
    HIT_LOCAL = "hit_local"
    HIT_REMOTE = "hit_remote"
    SSD = "ssd"
    COMPUTED = "computed"
    MISS = "miss"
    """It could not be had: it is computed again."""
    EXPIRED = "expired"
    """Its lease ran out before it was read: it is computed again."""
    CORRUPT = "corrupt"
    """Its checksum did not match: it is computed again."""


class ChunkMeta(Message, frozen=True):
    """One chunk on one node, as the registry stores it and the conductors index it."""

    key: ChunkKey
    index: int
    """Its number in the prompt that made it: 0 is the first chunk. Depth in the prefix."""
    num_tokens: int
    num_bytes: int
    checksum: bytes
    """xxh3-128 of the payload, 16 bytes, big-endian."""
    request_id: RequestId
    """The request that computed it."""
    created_ns: int
    parent: ChunkKey | None = None
    """Key of the chunk before it; None for the first."""
    model: ModelName = ModelName("")
    tenant: TenantId = TenantId("default")
    tier: Tier = Tier.DRAM
    hits: int = 0
    last_access_ns: int = 0


class ChunkRegistered(Message, frozen=True, tag="chunk.registered.v1"):
    """These chunks can now be read on this node."""

    node: NodeId
    epoch: int
    chunks: tuple[ChunkMeta, ...]


class EvictReason(StrEnum):
    CAPACITY = "capacity"
    FLUSH = "flush"
    CORRUPT = "corrupt"


class ChunkEvicted(Message, frozen=True, tag="evict.v1"):
    """These chunks are gone from this node."""

    node: NodeId
    epoch: int
    keys: tuple[ChunkKey, ...]
    reason: EvictReason


class NodeCleared(Message, frozen=True, tag="node.cleared.v1"):
    """This node's pool starts (or has stopped) with nothing in it: all it announced under older epochs is gone."""

    node: NodeId
    epoch: int


ChunkEvent = ChunkRegistered | ChunkEvicted | NodeCleared
"""The inbox of a `CHUNKS` follower."""


class ChunkPlacement(Message, frozen=True):
    """Where one chunk can be had."""

    node: NodeId
    epoch: int
    chunk: ChunkMeta
