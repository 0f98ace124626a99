"""Arenas of other nodes on this host, mapped so that their slots can be read where they lie."""

from pathlib import Path

from halfmoon.pool.arena import Arena, ArenaError
from halfmoon.schemas.kv_tier import ArenaRef

_MAX_MAPPED = 16


class Neighbours:
    """Maps arenas as they are met, and forgets those whose owner has gone, so that their memory can be freed.

    Views stay valid memory whatever happens here: a mapping goes with the last view of it.
    """

    def __init__(self, *, max_mapped: int = _MAX_MAPPED) -> None:
        """`max_mapped`: the arena mapped first makes room for one more."""
        self._max_mapped = max_mapped
        self._arenas: dict[str, Arena] = {}

    def __len__(self) -> int:
        """Number of arenas that are mapped."""
        return len(self._arenas)

    def arena(self, ref: ArenaRef) -> Arena:
        """The arena, mapped privately: what a reader might write into it would reach nobody. Raises `ArenaError`."""
        arena = self._arenas.get(ref.path)
        if arena is None:
            self.forget_dead()
            arena = Arena.attach(Path(ref.path), ref.slot_bytes, ref.num_slots, writable=False, private=True)
            while len(self._arenas) >= self._max_mapped:
                self._arenas.pop(next(iter(self._arenas))).close()
            self._arenas[ref.path] = arena
        return arena

    def generation(self, ref: ArenaRef, slot: int) -> int | None:
        """The slot's generation now; None where the arena can't be looked into any more."""
        try:
            return self.arena(ref).generation(slot)
        except ArenaError:
            return None

    def forget_dead(self) -> None:
        """Unmap the arenas whose file has been removed: nobody frees or fills their slots any more."""
        for path in [path for path in self._arenas if not Path(path).exists()]:
            self._arenas.pop(path).close()

    def close(self) -> None:
        """Idempotent."""
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
