"""Which chunks are to be kept, and which of them are. Pure.

What is asked for is kept apart from what is done: a chunk that isn't here is pinned when it comes, and so is one for
which there was no room among the pinned, when there is.
"""

from collections.abc import Collection, Iterable

from halfmoon.kv_tier.slots import SlotTable
from halfmoon.schemas.ids import ChunkKey
from halfmoon.schemas.kv_tier import PinsHeld


class Pins:
    """Of one pool: at most `max_slots` of its slots are pinned, so that requests in flight always find room."""

    def __init__(self, slots: SlotTable, max_slots: int) -> None:
        self._slots = slots
        self.max_slots = max_slots
        self._wanted: set[ChunkKey] = set()
        self._refused: dict[ChunkKey, None] = {}
        """Wanted and here, and one too many; the first refused is the first to be pinned."""

    def __contains__(self, key: ChunkKey) -> bool:
        """Whether it is to be kept."""
        return key in self._wanted

    @property
    def num_refused(self) -> int:
        return len(self._refused)

    def add(self, keys: Collection[ChunkKey]) -> PinsHeld:
        """Keep these too, now and whenever they come; what has become of them."""
        self._wanted.update(keys)
        self.came(keys)
        pinned = sum(self._is_pinned(key) for key in keys)
        refused = sum(key in self._refused for key in keys)
        return PinsHeld(
            num_pinned=pinned,
            num_absent=len(keys) - pinned - refused,
            num_refused=refused,
            max_slots=self.max_slots,
        )

    def remove(self, keys: Iterable[ChunkKey]) -> None:
        """Keep these no more. What was refused for want of room may be pinned now."""
        for key in keys:
            self._wanted.discard(key)
            self._refused.pop(key, None)
            slot = self._slots.find(key)
            if slot is not None:
                self._slots.unpin(slot)
        self._retry()

    def replace(self, keys: Collection[ChunkKey]) -> None:
        """Keep these and no others."""
        self.remove(self._wanted.difference(keys))
        self.add([key for key in keys if key not in self._wanted])

    def came(self, keys: Iterable[ChunkKey]) -> None:
        """These chunks are registered: pin those that are to be kept."""
        for key in keys:
            if key in self._wanted:
                self._pin(key)

    def went(self, keys: Iterable[ChunkKey]) -> None:
        """These are registered no more."""
        for key in keys:
            self._refused.pop(key, None)
        self._retry()

    def _retry(self) -> None:
        while self._refused and self._slots.counts().pinned < self.max_slots:
            key = next(iter(self._refused))
            del self._refused[key]
            self._pin(key)

    def _pin(self, key: ChunkKey) -> None:
        slot = self._slots.find(key)
        if slot is None or not slot.registered or self._is_pinned(key):
            return
        if self._slots.counts().pinned < self.max_slots:
            self._slots.pin(slot)
        else:
            self._refused[key] = None

    def _is_pinned(self, key: ChunkKey) -> bool:
        slot = self._slots.find(key)
        return slot is not None and slot.is_pinned
