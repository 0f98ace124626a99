"""The life of a prefill half, as data."""

from enum import Enum

from halfmoon.machine import Table


class HalfState(Enum):
    QUEUED = "queued"
    ACQUIRING = "acquiring"
    """Cached chunks are made readable on this node."""
    COMPUTING = "computing"
    HANDING_OVER = "handing_over"
    """All is announced; leases are held until decode has read it."""
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class HalfEvent(Enum):
    START = "start"
    ACQUIRED = "acquired"
    COMPUTED = "computed"
    LET_GO = "let go"
    """Decode has what it needs, or has given up waiting."""
    FAIL = "fail"
    CANCEL = "cancel"


_ALIVE = (HalfState.QUEUED, HalfState.ACQUIRING, HalfState.COMPUTING, HalfState.HANDING_OVER)

HALF_TABLE: Table[HalfState, HalfEvent] = {
    (HalfState.QUEUED, HalfEvent.START): HalfState.ACQUIRING,
    (HalfState.ACQUIRING, HalfEvent.ACQUIRED): HalfState.COMPUTING,
    (HalfState.COMPUTING, HalfEvent.COMPUTED): HalfState.HANDING_OVER,
    **{(state, HalfEvent.LET_GO): HalfState.DONE for state in _ALIVE},
    **{(state, HalfEvent.FAIL): HalfState.FAILED for state in _ALIVE},
    **{(state, HalfEvent.CANCEL): HalfState.CANCELLED for state in _ALIVE},
}
