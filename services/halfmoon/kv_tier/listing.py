"""What a node holds and how it is used, for people who look: pages of chunks, by what they are sorted by."""

import asyncio
import heapq
from collections.abc import Callable

import msgspec

from halfmoon.bus.endpoint import Envelope
from halfmoon.bus.errors import RemoteError
from halfmoon.chunks.selection import Selected
from halfmoon.kv_tier.store import ChunkStore
from halfmoon.schemas.chunks import Tier
from halfmoon.schemas.listing import ChunkList, ChunkOrder, HeldChunk, ListChunks
from halfmoon.schemas.wire import Error, ErrorCode

MAX_PAGE = 4096

_RANKS: dict[ChunkOrder, Callable[[HeldChunk], int]] = {
    ChunkOrder.HITS: lambda held: held.meta.hits,
    ChunkOrder.SIZE: lambda held: held.meta.num_bytes,
    ChunkOrder.AGE: lambda held: -held.meta.created_ns,
    ChunkOrder.IDLE: lambda held: -held.meta.last_access_ns,
}


class Lister:
    """Looks at a store, and changes nothing."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store

    async def page(self, request: ListChunks, envelope: Envelope) -> ChunkList:
        if not 1 <= request.limit <= MAX_PAGE:
            raise _refusal(f"limit is from 1 to {MAX_PAGE}, got {request.limit}")
        if request.after is not None and request.order is not ChunkOrder.KEY:
            raise _refusal("pages go by key: give `after` with that order only")
        held = self._held()
        page, num_matching = await asyncio.to_thread(_page, held, request)
        return ChunkList(epoch=self._store.epoch, chunks=tuple(page), num_matching=num_matching)

    def _held(self) -> list[HeldChunk]:
        """Each chunk once: as it lies in DRAM, if it lies there."""
        store = self._store
        held = {
            slot.meta.key: HeldChunk(
                meta=msgspec.structs.replace(
                    slot.meta, tier=Tier.DRAM, hits=slot.hits, last_access_ns=slot.last_access_ns
                ),
                num_leases=slot.num_leases,
                is_pinned=slot.is_pinned,
            )
            for slot in store.ledger.slots.registered()
            if slot.meta is not None
        }
        below = [] if store.lower is None else store.lower.ssd.metas()
        return [
            *held.values(),
            *(HeldChunk(meta=meta, is_pinned=meta.key in store.pins) for meta in below if meta.key not in held),
        ]


def _page(held: list[HeldChunk], request: ListChunks) -> tuple[list[HeldChunk], int]:
    """In a thread: an SSD may hold a million."""
    metas = {each.meta.key: each.meta for each in held}
    selected = Selected(request.selection, metas.get)
    found = [each for each in held if each.meta in selected]
    if request.ends_only:
        inner = {each.meta.parent for each in found}
        found = [each for each in found if each.meta.key not in inner]
    found = [
        each
        for each in found
        if request.tier in (None, each.meta.tier) and (request.after is None or each.meta.key > request.after)
    ]
    if request.order is ChunkOrder.KEY:
        return heapq.nsmallest(request.limit, found, key=lambda each: each.meta.key), len(found)
    return heapq.nlargest(request.limit, found, key=_RANKS[request.order]), len(found)


def _refusal(message: str) -> RemoteError:
    return RemoteError(Error(code=ErrorCode.INVALID_REQUEST, message=message))
