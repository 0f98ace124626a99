"""The book of standing orders: what is pinned, and what was flushed. Pure; times are passed in.

Orders are numbered without gaps, pins and flushes alike, so that whoever has carried out number n knows what is missing
from what the registry says later. The first number comes from the clock: should etcd ever be made anew, its numbers are
still higher than those that nodes remember.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from halfmoon.chunks.selection import coalesce
from halfmoon.schemas.ids import ChunkKey
from halfmoon.schemas.orders import FlushOrder, PinOrder, Selection

MAX_FLUSHES = 1000


class TooManyPins(Exception):
    """More keys than may be pinned in one deployment."""

    def __init__(self, wanted: int, limit: int) -> None:
        super().__init__(
            f"{wanted:,} chunks would be pinned, and at most {limit:,} may be: unpin some, or raise the registry's "
            "max_pins"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one order changes in the book, and in etcd."""

    seq: int
    """Its number; the book's last one where nothing changes."""
    put_flushes: tuple[FlushOrder, ...] = ()
    drop_flushes: tuple[int, ...] = ()
    put_pins: tuple[PinOrder, ...] = ()
    drop_pins: tuple[ChunkKey, ...] = ()


@dataclass(slots=True)
class OrderBook:
    """All that stands."""

    seq: int = 0
    """The last order's number; 0 before the first."""
    flushes: dict[int, FlushOrder] = field(default_factory=dict)
    pins: dict[ChunkKey, PinOrder] = field(default_factory=dict)

    def plan_flush(self, selection: Selection, now_ns: int, lifetime_s: float) -> tuple[FlushOrder, Change]:
        """One more flush, and the end of the pins that it means.

        Flushes older than `lifetime_s` become one: see `coalesce`.
        """
        before_ns = max([now_ns, *(order.before_ns for order in self.flushes.values())])
        order = FlushOrder(seq=self._next(now_ns), before_ns=before_ns, selection=selection)
        kept = coalesce([*self.flushes.values(), order], MAX_FLUSHES, now_ns - int(lifetime_s * 1e9))
        change = Change(
            seq=order.seq,
            put_flushes=tuple(each for each in kept if self.flushes.get(each.seq) != each),
            drop_flushes=tuple(self.flushes.keys() - {each.seq for each in kept}),
            drop_pins=tuple(pin.key for pin in pins_of(selection, self.pins)),
        )
        return order, change

    def plan_pins(self, pins: Iterable[PinOrder], now_ns: int, max_pins: int) -> Change:
        """Pin these too. Raises `TooManyPins`."""
        new = {pin.key: pin for pin in pins if self.pins.get(pin.key) != pin}
        num_pins = len(self.pins.keys() | new.keys())
        if num_pins > max_pins:
            raise TooManyPins(num_pins, max_pins)
        return Change(seq=self._next(now_ns) if new else self.seq, put_pins=tuple(new.values()))

    def plan_unpin(self, selection: Selection, now_ns: int) -> Change:
        keys = tuple(pin.key for pin in pins_of(selection, self.pins))
        return Change(seq=self._next(now_ns) if keys else self.seq, drop_pins=keys)

    def apply(self, change: Change) -> None:
        self.seq = change.seq
        for seq in change.drop_flushes:
            self.flushes.pop(seq, None)
        self.flushes.update({order.seq: order for order in change.put_flushes})
        for key in change.drop_pins:
            self.pins.pop(key, None)
        self.pins.update({pin.key: pin for pin in change.put_pins})

    @property
    def last_flush(self) -> FlushOrder | None:
        return self.flushes[max(self.flushes)] if self.flushes else None

    def flushes_after(self, seq: int) -> list[FlushOrder]:
        """Oldest first."""
        return [self.flushes[each] for each in sorted(self.flushes) if each > seq]

    def _next(self, now_ns: int) -> int:
        return self.seq + 1 if self.seq else now_ns // 1_000_000


def pins_of(selection: Selection, pins: Mapping[ChunkKey, PinOrder]) -> Sequence[PinOrder]:
    """The pins that a selection means. One behind a prefix is told by the pins between them."""
    if selection.is_empty:
        return ()
    named = {*selection.keys, *selection.prefixes}
    prefixes = frozenset(selection.prefixes)
    return [
        pin
        for pin in pins.values()
        if selection.tenant in (None, pin.tenant)
        and selection.model in (None, pin.model)
        and (not named or pin.key in named or _is_behind(pin, prefixes, pins))
    ]


def _is_behind(pin: PinOrder, prefixes: frozenset[ChunkKey], pins: Mapping[ChunkKey, PinOrder]) -> bool:
    seen: set[ChunkKey] = set()
    above: PinOrder | None = pin
    while above is not None and above.key not in seen:
        if above.key in prefixes:
            return True
        seen.add(above.key)
        above = None if above.parent is None else pins.get(above.parent)
    return False
