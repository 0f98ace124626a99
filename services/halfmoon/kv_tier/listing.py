"""What a node holds and how it is used, for people who look: pages of chunks, by what they are sorted by."""

import heapq
from collections.abc import Callable, Iterator

import msgspec

from halfmoon.bus.endpoint import Envelope
from halfmoon.bus.errors import RemoteError
from halfmoon.chunks.selection import Selected
from halfmoon.kv_tier.store import ChunkStore
from halfmoon.schemas.chunks import Tier
from halfmoon.schemas.kv_tier import ChunkList, ChunkOrder, HeldChunk, ListChunks
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

    async def list(self, request: ListChunks, envelope: Envelope) -> ChunkList:
        if not 1 <= request.limit <= MAX_PAGE:
            raise _refusal(f"limit is from 1 to {MAX_PAGE}, got {request.limit}")
        if request.after is not None and request.order is not ChunkOrder.KEY:
            raise _refusal("pages go by key: give `after` with that order only")
        selected = Selected(request.selection, self._store.meta_of)
        held = [each for each in self._held() if each.meta in selected]
        if request.ends_only:
            inner = {each.meta.parent for each in held}
            held = [each for each in held if each.meta.key not in inner]
        held = [
            each
            for each in held
            if request.tier in (None, each.meta.tier) and (request.after is None or each.meta.key > request.after)
        ]
        if request.order is ChunkOrder.KEY:
            page = heapq.nsmallest(request.limit, held, key=lambda each: each.meta.key)
        else:
            page = heapq.nlargest(request.limit, held, key=_RANKS[request.order])
        return ChunkList(epoch=self._store.epoch, chunks=tuple(page), num_matching=len(held))

    def _held(self) -> Iterator[HeldChunk]:
        """Each chunk once: as it lies in DRAM, if it lies there."""
        store = self._store
        for slot in store.ledger.slots.registered():
            if slot.meta is not None:
                meta = msgspec.structs.replace(
                    slot.meta, tier=Tier.DRAM, hits=slot.hits, last_access_ns=slot.last_access_ns
                )
                yield HeldChunk(meta=meta, num_leases=slot.num_leases, is_pinned=slot.is_pinned)
        if store.lower is not None:
            for meta in store.lower.ssd.metas():
                above = store.ledger.slots.find(meta.key)
                if above is None or not above.registered:
                    yield HeldChunk(meta=meta, is_pinned=meta.key in store.pins)


def _refusal(message: str) -> RemoteError:
    return RemoteError(Error(code=ErrorCode.INVALID_REQUEST, message=message))
