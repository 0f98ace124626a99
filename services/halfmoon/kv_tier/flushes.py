"""Which flushes a pool has carried out, so that nothing comes back that they meant. Pure; times are in the orders.

A chunk is stale where a flush selects it and it was computed before, or for a request that was at work here when the
flush came: what such a request computes may rest on what was flushed.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from halfmoon.chunks.selection import Find, Selected, coalesce
from halfmoon.schemas.chunks import ChunkMeta
from halfmoon.schemas.ids import ChunkKey, RequestId
from halfmoon.schemas.orders import FlushOrder

MAX_FLUSHES = 256
MAX_INTERRUPTED = 32
"""The latest flushes for which it is remembered who was at work."""


class FlushBook:
    """Of one life of a pool."""

    def __init__(self) -> None:
        self._orders: list[FlushOrder] = []
        self._interrupted: deque[tuple[FlushOrder, frozenset[RequestId]]] = deque(maxlen=MAX_INTERRUPTED)

    def carried_out(self, order: FlushOrder, at_work: Iterable[RequestId]) -> None:
        self._orders = coalesce([*self._orders, order], MAX_FLUSHES)
        self._interrupted.append((order, frozenset(at_work)))

    def is_stale(self, meta: ChunkMeta, request_id: RequestId, find: Find) -> bool:
        """Whether this chunk, computed or brought here for that request, must not be found by anybody."""
        orders = [order for order in self._orders if meta.created_ns < order.before_ns]
        orders += [order for order, at_work in self._interrupted if request_id in at_work]
        return any(meta in Selected(order.selection, find) for order in orders)


def flushed_by(order: FlushOrder, metas: Sequence[ChunkMeta], *, is_late: bool) -> set[ChunkKey]:
    """Which of a pool's chunks an order means.

    All that it selects. Where it comes late, those that were computed before it, and those behind them: chunks that
    were computed since may rest on nothing but chunks computed since.
    """
    by_key = {meta.key: meta for meta in metas}
    selected = Selected(order.selection, by_key.get)
    gone: set[ChunkKey] = set()
    for meta in sorted(metas, key=lambda each: each.index):
        if meta in selected and (not is_late or meta.created_ns < order.before_ns or meta.parent in gone):
            gone.add(meta.key)
    return gone
