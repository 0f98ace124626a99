"""The life of a slot, as data.

A committed slot becomes ready and is leased to its writer in one step; a slot that isn't registered for reuse is
discarded when the last lease on it goes.
"""

from enum import Enum

from halfmoon.machine import Table


class SlotState(Enum):
    FREE = "free"
    STAGED = "staged"
    """Being written by the one lease that holds it; nobody else sees it."""
    READY = "ready"
    """Readable, and held by no lease: what eviction may take."""
    LEASED = "leased"
    """Readable, and held by at least one lease."""
    PINNED = "pinned"
    """Readable, and kept until it is unpinned. Leases may hold it too; it is counted here alone."""


class SlotEvent(Enum):
    RESERVE = "reserve"
    COMMIT = "commit"
    ABANDON = "abandon"
    """The writer's lease was released or expired before it committed."""
    LEASE = "lease"
    RELEASE = "release"
    """One of several leases has gone."""
    RELEASE_LAST = "release last"
    PIN = "pin"
    UNPIN = "unpin"
    """With no lease on it."""
    UNPIN_LEASED = "unpin leased"
    EVICT = "evict"
    DISCARD = "discard"
    """Unregistered, and nobody holds it any more."""


SLOT_TABLE: Table[SlotState, SlotEvent] = {
    (SlotState.FREE, SlotEvent.RESERVE): SlotState.STAGED,
    (SlotState.STAGED, SlotEvent.COMMIT): SlotState.READY,
    (SlotState.STAGED, SlotEvent.ABANDON): SlotState.FREE,
    (SlotState.READY, SlotEvent.LEASE): SlotState.LEASED,
    (SlotState.READY, SlotEvent.EVICT): SlotState.FREE,
    (SlotState.READY, SlotEvent.DISCARD): SlotState.FREE,
    (SlotState.LEASED, SlotEvent.LEASE): SlotState.LEASED,
    (SlotState.LEASED, SlotEvent.RELEASE): SlotState.LEASED,
    (SlotState.LEASED, SlotEvent.RELEASE_LAST): SlotState.READY,
    (SlotState.READY, SlotEvent.PIN): SlotState.PINNED,
    (SlotState.LEASED, SlotEvent.PIN): SlotState.PINNED,
    (SlotState.PINNED, SlotEvent.LEASE): SlotState.PINNED,
    (SlotState.PINNED, SlotEvent.RELEASE): SlotState.PINNED,
    (SlotState.PINNED, SlotEvent.RELEASE_LAST): SlotState.PINNED,
    (SlotState.PINNED, SlotEvent.UNPIN): SlotState.READY,
    (SlotState.PINNED, SlotEvent.UNPIN_LEASED): SlotState.LEASED,
}
