"""What a pool tells of itself: in the answer to `Stats`, and in its node's heartbeats."""

import msgspec

from halfmoon.schemas.ids import ModelName, TenantId
from halfmoon.schemas.wire import Message


class Stats(Message, frozen=True, tag="kvtier.stats.v1"):
    pass


class TenantUse(Message, frozen=True):
    """What one tenant has of one model in a pool, and what became of the chunks that it asked for since the start."""

    tenant: TenantId
    """`other`: all those that are too small for a row of their own."""
    model: ModelName
    num_chunks: dict[str, int] = msgspec.field(default_factory=dict)
    """By tier."""
    num_bytes: dict[str, int] = msgspec.field(default_factory=dict)
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    """Of its chunks."""
    refused: int = 0
    """New chunks of its that weren't kept: it has its quota, and all of it in use."""
    hit_tokens: int = 0


class SsdStats(Message, frozen=True):
    """A pool's SSD tier. Counts are since the start."""

    num_chunks: int
    """With a whole file, whether or not they are in DRAM too."""
    num_bytes: int
    """Of their files."""
    max_bytes: int
    hits: int = 0
    """Chunks asked for that were read from the SSD."""
    reads: int = 0
    writes: int = 0
    demotions: int = 0
    """Chunks that left DRAM and are on the SSD."""
    promotions: int = 0
    """Chunks that were read from the SSD and are kept in DRAM again."""
    refused: int = 0
    """Chunks that left DRAM and weren't worth a write."""
    evictions: int = 0
    errors: int = 0
    """Reads and writes that failed."""
    removed: dict[str, int] = msgspec.field(default_factory=dict)
    """Files that could not be served, by reason: `torn`, `foreign`, `version`, `old`, `missing`."""
    failure: str = ""
    """Why the disk is left alone for now; empty when all is well."""
    high_watermark: float = 1.0
    """Share of DRAM in use above which demotion begins, at present."""
    low_watermark: float = 1.0
    promote_within: int = 0
    """Promoted is what is used twice while the pool takes in so many chunks, at present."""


class PoolStats(Message, frozen=True, tag="kvtier.pool.v1"):
    """Slots by state: `free + staged + ready + leased + pinned = total`, always.

    A pinned slot that is leased too is counted in `pinned` alone.
    """

    total: int
    free: int
    staged: int
    ready: int
    leased: int
    num_leases: int
    num_chunks: int
    """Registered chunks, readable by key."""
    hits_local: int = 0
    hits_remote: int = 0
    misses: int = 0
    evictions: int = 0
    bytes_pulled: int = 0
    bytes_served: int = 0
    bytes_in_place: int = 0
    """Of chunks that readers here were given in other nodes' arenas: nothing was copied into this pool."""
    pinned: int = 0
    pins_refused: int = 0
    """Chunks here that are to be pinned, and aren't, since no more slots may be."""
    tenants: tuple[TenantUse, ...] = ()
    """In the answer to `Stats` only, not in heartbeats. The biggest first."""
    ssd: SsdStats | None = None
    """None where the pool has no SSD tier."""
