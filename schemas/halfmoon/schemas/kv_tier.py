"""What a pool (kv-tier) is asked, and answers. Request-reply on `halfmoon.kvtier.<node>.<verb>`.

A refusal is a `wire.Error`. Bulk bytes never travel in these messages: they name slots of the arena, which callers on
the same host map, and other nodes read through a transport.
"""

from halfmoon.schemas.chunks import ChunkMeta, ChunkOutcome, Tier
from halfmoon.schemas.ids import ChunkKey, LeaseId, ModelName, NodeId, RequestId, TenantId, WorkerId
from halfmoon.schemas.listing import ChunkList, ListChunks
from halfmoon.schemas.orders import FlushOrder
from halfmoon.schemas.pool_stats import PoolStats, Stats
from halfmoon.schemas.probes import Probe, Probed
from halfmoon.schemas.rdma import RdmaOffer
from halfmoon.schemas.wire import Error, Message

NOBODY = TenantId("")


class NodeInfo(Message, frozen=True, tag="kvtier.node.v1"):
    """How to reach a pool's memory. The answer to `Describe`; stable within an epoch."""

    node: NodeId
    epoch: int
    host: str
    """Nodes with the same host label can map each other's arena; others use the network."""
    arena_path: str
    slot_bytes: int
    """Distance between slots: a multiple of the page size."""
    num_slots: int
    tcp_address: str | None = None
    """`host:port` of the tcp transport's server."""
    rdma: RdmaOffer | None = None
    """None where it can't be read over RDMA."""


class ArenaRef(Message, frozen=True):
    """Another node's arena on the same host, so that a reader of its slots can map it."""

    node: NodeId
    epoch: int
    path: str
    slot_bytes: int
    num_slots: int


class SlotRef(Message, frozen=True):
    """A place in one node's arena, at one time of its life: bytes `[slot * slot_bytes, … + num_bytes)`."""

    slot: int
    generation: int
    """Rises each time the slot is freed, so that a late reader notices."""
    num_bytes: int
    checksum: bytes = b""
    """Of the payload; empty while it is being written."""
    arena: ArenaRef | None = None
    """Where the slot lies, for reading only. None: in the arena of the pool that was asked."""


class ChunkSource(Message, frozen=True):
    """A node that is believed to hold a chunk."""

    node: NodeId
    epoch: int


class WantedChunk(Message, frozen=True):
    key: ChunkKey
    index: int
    num_tokens: int
    num_bytes: int
    sources: tuple[ChunkSource, ...] = ()
    """Where to pull it from, best first, where this node doesn't have it. Empty: local or nothing."""


class Describe(Message, frozen=True, tag="kvtier.describe.v1"):
    pass


class Acquire(Message, frozen=True, tag="kvtier.acquire.v1"):
    """Lease these chunks for reading; pull from elsewhere what isn't here."""

    request_id: RequestId
    holder: WorkerId
    chunks: tuple[WantedChunk, ...]
    lease_s: float
    keep: bool = True
    """Whether what is pulled stays in this pool afterwards, and is announced; otherwise it is freed with the lease."""
    in_place: bool = False
    """The reader can map other arenas of its host (`SlotRef.arena`): what isn't kept needs no copy then."""
    unasked: bool = False
    """For another pool that makes copies by itself: no request uses the chunks now."""
    tenant: TenantId = TenantId("default")
    """On whose behalf, for accounting; and `model`. `NOBODY`: another pool asks, which keeps the account itself."""
    model: ModelName = ModelName("")
    direct: bool = False
    """For another pool that will have its own copy: what must come off the SSD for it isn't kept in memory here."""


class AcquiredChunk(Message, frozen=True):
    """What became of one wanted chunk."""

    key: ChunkKey
    index: int
    outcome: ChunkOutcome
    slot: SlotRef | None = None
    """Leased to the caller on a hit, else None."""
    meta: ChunkMeta | None = None
    source: NodeId | None = None
    transport: str | None = None
    num_bytes_moved: int = 0
    started_ns: int = 0
    """Unix time at which the pull was asked for; 0 where nothing moved."""
    transfer_started_ns: int = 0
    finished_ns: int = 0
    detail: str = ""
    """For misses: why, for a person."""
    traceparent: str | None = None
    """Trace context of the request that made the chunk, so that its later life elsewhere can link back to it."""


class Acquired(Message, frozen=True, tag="kvtier.acquired.v1"):
    lease_id: LeaseId
    expires_ns: int
    chunks: tuple[AcquiredChunk, ...]
    """In the order asked."""
    epoch: int = 0
    """Of the pool that answers: the arena to look into is this one's."""


class NewChunk(Message, frozen=True):
    """A chunk that is about to be written."""

    key: ChunkKey
    index: int
    num_tokens: int
    num_bytes: int
    parent: ChunkKey | None = None
    register: bool = True
    """False for a partial chunk: handed over, then freed with the lease; never announced."""


class Reserve(Message, frozen=True, tag="kvtier.reserve.v1"):
    """Lease empty slots for writing."""

    request_id: RequestId
    holder: WorkerId
    chunks: tuple[NewChunk, ...]
    lease_s: float
    tenant: TenantId = TenantId("default")
    """Whose quota the chunks will count for, and on whose behalf others' may be evicted."""


class ReservedChunk(Message, frozen=True):
    key: ChunkKey
    index: int
    slot: SlotRef | None
    """None where the pool had no room: chunks are served in order, so all after it have none either."""


class Reserved(Message, frozen=True, tag="kvtier.reserved.v1"):
    lease_id: LeaseId
    expires_ns: int
    chunks: tuple[ReservedChunk, ...]
    epoch: int = 0
    """Of the pool that answers: the arena to look into is this one's."""


class WrittenChunk(Message, frozen=True):
    """A reserved slot that now holds its payload."""

    slot: int
    generation: int
    meta: ChunkMeta
    register: bool = True


class Commit(Message, frozen=True, tag="kvtier.commit.v1"):
    """Make written chunks readable. They stay leased to the writer until it releases."""

    lease_id: LeaseId
    chunks: tuple[WrittenChunk, ...]


class Committed(Message, frozen=True, tag="kvtier.committed.v1"):
    num_registered: int
    """Fewer than were committed where another writer was first with the same key, or it isn't to be registered."""


class Release(Message, frozen=True, tag="kvtier.release.v1"):
    """Give leases back, whole. Unknown ones are ignored: they have expired."""

    lease_ids: tuple[LeaseId, ...]


class Renew(Message, frozen=True, tag="kvtier.renew.v1"):
    lease_ids: tuple[LeaseId, ...]
    lease_s: float


class Renewed(Message, frozen=True, tag="kvtier.renewed.v1"):
    expired: tuple[LeaseId, ...] = ()
    """Those that no longer exist: what they held may be gone."""


class Report(Message, frozen=True, tag="kvtier.report.v1"):
    """This chunk was read, and its checksum is wrong. The pool looks for itself, and withdraws it where that is so."""

    key: ChunkKey
    slot: int
    generation: int


class Inventory(Message, frozen=True, tag="kvtier.inventory.v1"):
    """What is registered here? In pages, by ascending key."""

    after: ChunkKey | None = None
    """The last key of the page before; None for the first page."""
    limit: int = 4096


class InventoryPage(Message, frozen=True, tag="kvtier.inventorypage.v1"):
    node: NodeId
    epoch: int
    keys: tuple[ChunkKey, ...]
    """Readable by key at this moment. Fewer than the limit: the last page."""
    pending: int = 0
    """Changes that the stream `CHUNKS` has not been told yet."""
    on_ssd: tuple[ChunkKey, ...] | None = None
    """Those of the keys that only the SSD holds. None: this pool doesn't say."""


class Retell(Message, frozen=True, tag="kvtier.retell.v1"):
    """Say again in the stream `CHUNKS` what is true of these chunks: registered, or gone. At most 4,096 keys.

    For whoever finds that what it knows differs from an inventory. The pool itself tells, so nothing it says meanwhile
    can be overtaken.
    """

    keys: tuple[ChunkKey, ...]


class Done(Message, frozen=True, tag="kvtier.done.v1"):
    pass


class FlushChunks(Message, frozen=True, tag="kvtier.flush.v1"):
    """Let nobody find these chunks any more, in any tier. By the registry: ask it for a flush, not the nodes."""

    order: FlushOrder
    unpin: tuple[ChunkKey, ...] = ()
    """Pins that end with it."""


class TierFlush(Message, frozen=True):
    tier: Tier
    num_chunks: int
    num_bytes: int


class ChunksFlushed(Message, frozen=True, tag="kvtier.flushed.v1"):
    tiers: tuple[TierFlush, ...]
    num_leased: int = 0
    """Of them, those whose slots are freed only when their readers let go."""


class PinChunks(Message, frozen=True, tag="kvtier.pin.v1"):
    """Keep these chunks, now and whenever they come to this node. By the registry: ask it for pins, not the nodes."""

    seq: int
    keys: tuple[ChunkKey, ...]


class UnpinChunks(Message, frozen=True, tag="kvtier.unpin.v1"):
    """Let eviction take these chunks again. By the registry."""

    seq: int
    keys: tuple[ChunkKey, ...]


class PinsHeld(Message, frozen=True, tag="kvtier.pins.v1"):
    """What became of the chunks named."""

    num_pinned: int
    """In this node's memory, and pinned."""
    num_absent: int
    """Not in its memory: they are pinned when they come."""
    num_refused: int = 0
    """In its memory, and not pinned: no more than `max_pinned_share` of the slots can be."""
    max_slots: int = 0


class CatchUp(Message, frozen=True, tag="kvtier.catchup.v1"):
    """There are standing orders that this node has not carried out: ask the registry for them."""


KvTierRequest = (
    Describe
    | Acquire
    | Reserve
    | Commit
    | Release
    | Renew
    | Report
    | Stats
    | Probe
    | Inventory
    | Retell
    | FlushChunks
    | PinChunks
    | UnpinChunks
    | CatchUp
    | ListChunks
)
"""The inbox of a kv-tier."""

KvTierReply = (
    NodeInfo
    | Acquired
    | Reserved
    | Committed
    | Renewed
    | Done
    | PoolStats
    | Probed
    | InventoryPage
    | ChunksFlushed
    | PinsHeld
    | ChunkList
    | Error
)
