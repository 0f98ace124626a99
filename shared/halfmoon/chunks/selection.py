"""Which chunks an operator's selection means, and how many orders to flush need to be kept. Pure.

Whether a chunk follows a prefix is told by its line of parents. A line that is broken (a chunk in it has been evicted)
can't be told; such a chunk counts as following, since a flush may cost a recomputation, but not leave anything behind.
"""

from collections.abc import Callable, Iterable, Sequence

from halfmoon.schemas.chunks import ChunkMeta
from halfmoon.schemas.ids import ChunkKey
from halfmoon.schemas.orders import FlushOrder, Selection

Find = Callable[[ChunkKey], ChunkMeta | None]
"""The chunk of this key, wherever it is held."""


class Selected:
    """Tells whether chunks are selected. Remembers what it has found out: for one look at a pool as it is now."""

    def __init__(self, selection: Selection, find: Find) -> None:
        self._selection = selection
        self._keys = frozenset(selection.keys)
        self._find = find
        self._follows: dict[ChunkKey, bool] = dict.fromkeys(selection.prefixes, True)

    def __contains__(self, meta: ChunkMeta) -> bool:
        selection = self._selection
        if selection.tenant not in (None, meta.tenant) or selection.model not in (None, meta.model):
            return False
        if selection.is_empty:
            return False
        if not (selection.keys or selection.prefixes):
            return True
        return meta.key in self._keys or (bool(selection.prefixes) and self._is_behind(meta))

    def _is_behind(self, meta: ChunkMeta) -> bool:
        line: list[ChunkKey] = []
        while (follows := self._follows.get(meta.key)) is None:
            line.append(meta.key)
            if meta.parent is None:
                follows = False
                break
            above = self._find(meta.parent)
            if above is None or above.index >= meta.index:
                follows = self._follows.get(meta.parent, True)
                break
            meta = above
        self._follows.update(dict.fromkeys(line, follows))
        return follows


def includes(wide: Selection, narrow: Selection) -> bool:
    """Whether all that `narrow` selects is certainly selected by `wide`."""
    if wide.is_empty or narrow.is_empty:
        return narrow.is_empty
    if wide.tenant not in (None, narrow.tenant) or wide.model not in (None, narrow.model):
        return False
    if not (wide.keys or wide.prefixes):
        return True
    if not (narrow.keys or narrow.prefixes):
        return False
    return {*narrow.prefixes} <= {*wide.prefixes} and {*narrow.keys} <= {*wide.keys, *wide.prefixes}


def coalesce(orders: Iterable[FlushOrder], limit: int, forget_before_ns: int = 0) -> list[FlushOrder]:
    """As few orders as do the same, by ascending number; never more than `limit` (1 or more).

    An order is done with when a later one selects the same and more. Where too many are left, or some are from before
    `forget_before_ns`, the oldest become one that flushes everything: right for whoever was away for so long, and of no
    concern to those who have carried them out.
    """
    kept: list[FlushOrder] = []
    for order in sorted(orders, key=lambda each: each.seq, reverse=True):
        if not any(later.before_ns >= order.before_ns and includes(later.selection, order.selection) for later in kept):
            kept.append(order)
    kept.reverse()
    num_old = sum(order.before_ns < forget_before_ns for order in kept)
    num_merged = max(num_old, len(kept) - limit + 1 if len(kept) > limit else 0)
    if num_merged and not (num_merged == 1 and kept[0].selection == Selection(everything=True)):
        merged, kept = kept[:num_merged], kept[num_merged:]
        kept.insert(0, _everything(merged))
    return kept


def _everything(orders: Sequence[FlushOrder]) -> FlushOrder:
    return FlushOrder(
        seq=max(order.seq for order in orders),
        before_ns=max(order.before_ns for order in orders),
        selection=Selection(everything=True),
        is_merged=True,
    )
