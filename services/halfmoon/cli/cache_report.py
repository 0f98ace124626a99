"""What is known of a cluster's cache, as `halfmoon cache ls` and `stat` report it. Pure."""

from collections.abc import Mapping, Sequence

import msgspec

from halfmoon.schemas.chunks import Tier
from halfmoon.schemas.ids import ChunkKey, ModelName, NodeId, TenantId, WorkerId
from halfmoon.schemas.listing import ChunkOrder, HeldChunk
from halfmoon.schemas.members import MemberState, NodeHeartbeat, ServiceHeartbeat, WorkerHeartbeat
from halfmoon.schemas.pool_stats import PoolStats
from halfmoon.schemas.splits import Role

LiveHeartbeat = WorkerHeartbeat | NodeHeartbeat | ServiceHeartbeat


class Copy(msgspec.Struct, frozen=True):
    """A chunk on one node."""

    node: NodeId
    tier: Tier
    hits: int
    last_access_ns: int
    num_leases: int
    pinned: bool


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk, wherever it is."""

    key: str
    index: int
    prefix_tokens: int
    """Of its prompts, up to its end."""
    num_bytes: int
    model: ModelName
    tenant: TenantId
    created_ns: int
    hits: int
    last_access_ns: int
    pinned: bool
    copies: list[Copy]


class Listing(msgspec.Struct, frozen=True):
    chunks: list[Row]
    num_copies: int
    """That the question means, listed or not; from its `after` on."""
    next: str | None
    """Ordered by key: where to go on; None where this is all."""
    failed: dict[NodeId, str]
    """Nodes that did not answer, and why."""


class NodeStat(msgspec.Struct, frozen=True):
    node: NodeId
    state: MemberState
    slot_bytes: int
    pool: PoolStats


class EngineStat(msgspec.Struct, frozen=True):
    """The KV memory of an engine: its tier `hbm`."""

    worker: WorkerId
    role: Role
    node: NodeId
    total_tokens: int
    free_tokens: int


class Stat(msgspec.Struct, frozen=True, kw_only=True):
    nodes: list[NodeStat]
    engines: list[EngineStat]
    prompt_tokens: int
    """Of the requests that have ended since the conductors' start."""
    cached_tokens: int
    """Of these, those whose KV was found and not computed."""
    failed: dict[NodeId, str]

    @property
    def hit_ratio(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


def listing(
    held: Mapping[NodeId, Sequence[HeldChunk]],
    num_copies: int,
    failed: dict[NodeId, str],
    order: ChunkOrder,
    limit: int,
) -> Listing:
    """Each chunk once, with all its copies that the nodes told of; at most `limit`."""
    by_key: dict[ChunkKey, list[tuple[NodeId, HeldChunk]]] = {}
    for node, chunks in held.items():
        for chunk in chunks:
            by_key.setdefault(chunk.meta.key, []).append((node, chunk))
    rows = [_row(copies) for copies in by_key.values()]
    if order is ChunkOrder.KEY:
        rows.sort(key=lambda row: row.key)
    else:
        rows.sort(key=lambda row: (_rank(row, order), row.key))
    is_more = order is ChunkOrder.KEY and (len(rows) > limit or any(len(chunks) >= limit for chunks in held.values()))
    rows = rows[:limit]
    return Listing(rows, num_copies, rows[-1].key if is_more else None, failed)


def stat_of(
    members: Sequence[LiveHeartbeat], nodes: Sequence[NodeHeartbeat], stats: Mapping[NodeId, PoolStats | str]
) -> Stat:
    found = [
        NodeStat(beat.node, beat.state, beat.slot_bytes, pool)
        for beat in nodes
        if isinstance(pool := stats[beat.node], PoolStats)
    ]
    services = [beat for beat in members if isinstance(beat, ServiceHeartbeat)]
    return Stat(
        nodes=found,
        engines=[
            EngineStat(beat.worker, beat.role, beat.node, beat.total_tokens, beat.free_tokens)
            for beat in members
            if isinstance(beat, WorkerHeartbeat)
        ],
        prompt_tokens=sum(beat.prompt_tokens for beat in services),
        cached_tokens=sum(beat.cached_tokens for beat in services),
        failed={node: answer for node, answer in stats.items() if isinstance(answer, str)},
    )


def _row(copies: Sequence[tuple[NodeId, HeldChunk]]) -> Row:
    meta = copies[0][1].meta
    return Row(
        key=meta.key.hex(),
        index=meta.index,
        prefix_tokens=(meta.index + 1) * meta.num_tokens,
        num_bytes=meta.num_bytes,
        model=meta.model,
        tenant=meta.tenant,
        created_ns=min(held.meta.created_ns for _, held in copies),
        hits=sum(held.meta.hits for _, held in copies),
        last_access_ns=max(held.meta.last_access_ns for _, held in copies),
        pinned=any(held.is_pinned for _, held in copies),
        copies=[
            Copy(node, held.meta.tier, held.meta.hits, held.meta.last_access_ns, held.num_leases, held.is_pinned)
            for node, held in copies
        ],
    )


def _rank(row: Row, order: ChunkOrder) -> int:
    """Ascending: the first to be listed has the lowest."""
    match order:
        case ChunkOrder.HITS:
            return -row.hits
        case ChunkOrder.SIZE:
            return -row.num_bytes
        case ChunkOrder.AGE:
            return row.created_ns
        case _:
            return row.last_access_ns
