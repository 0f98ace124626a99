"""One slot of an arena: what it holds, and in which state it is. Pure."""

from dataclasses import dataclass, field

from halfmoon.kv_tier.state import SLOT_TABLE, SlotEvent, SlotState
from halfmoon.machine import Machine
from halfmoon.schemas.chunks import ChunkMeta
from halfmoon.schemas.ids import ChunkKey

_READABLE = frozenset({SlotState.READY, SlotState.LEASED, SlotState.PINNED})


def _free_machine() -> Machine[SlotState, SlotEvent]:
    return Machine(SLOT_TABLE, SlotState.FREE)


@dataclass(slots=True)
class Slot:
    """One slot. Only `SlotTable` changes it."""

    number: int
    generation: int
    """Rises by one each time the slot is freed."""
    machine: Machine[SlotState, SlotEvent] = field(default_factory=_free_machine)
    key: ChunkKey | None = None
    """Set from reserve to free."""
    num_bytes: int = 0
    meta: ChunkMeta | None = None
    """Set from commit to free."""
    registered: bool = False
    """Announced, and kept when its last lease goes."""
    num_leases: int = 0
    hits: int = 0
    last_access_ns: int = 0
    traceparent: str | None = None
    """Trace context of the commit, so that a later eviction can link back to it."""

    @property
    def state(self) -> SlotState:
        return self.machine.state

    @property
    def is_pinned(self) -> bool:
        return self.state is SlotState.PINNED

    @property
    def readable(self) -> bool:
        return self.state in _READABLE
