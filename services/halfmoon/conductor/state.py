"""The life of a request in its conductor's hands, as data.

**Exactly one terminal message.** Until a decode worker may have a request, its conductor ends it. From then on that
decode worker does, and tells the conductor with `HalfEnded`. The conductor speaks again only where that worker can't:
it is lost, or silent past the deadline. So each way out of the table below has one speaker:

    received, waiting, placing ─ fail, cancel ─▶ the conductor
    running ─ finish ─────────────────────────▶ the decode worker, already (also where it failed, or was cancelled)
    running ─ fail, cancel ───────────────────▶ the conductor: that worker is lost and nobody takes over, or it is stuck
    any     ─ hand back ──────────────────────▶ nobody yet: the next conductor, which gets the request redelivered, or
                                                has got it, since this one or the broker stood still
"""

from enum import Enum

from halfmoon.machine import Table


class RequestState(Enum):
    RECEIVED = "received"
    WAITING = "waiting"
    """No worker has room for it yet, or others come first."""
    PLACING = "placing"
    """A plan exists; workers are being asked."""
    RUNNING = "running"
    """A decode worker has it."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    HANDED_BACK = "handed_back"


class RequestEvent(Enum):
    WAIT = "wait"
    PLACE = "place"
    ACCEPT = "accept"
    """A decode worker took it; or doesn't answer, and so may have."""
    ADOPT = "adopt"
    """It was delivered again, and a decode worker runs it already."""
    RESPLIT = "resplit"
    """The prefill worker is lost: its half goes to another, or decode is told to compute."""
    RESUME = "resume"
    """The decode worker is lost: another goes on from the tokens that are known."""
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "cancel"
    HAND_BACK = "hand back"


INITIAL = RequestState.RECEIVED

TABLE: Table[RequestState, RequestEvent] = {
    (RequestState.RECEIVED, RequestEvent.WAIT): RequestState.WAITING,
    (RequestState.RECEIVED, RequestEvent.PLACE): RequestState.PLACING,
    (RequestState.RECEIVED, RequestEvent.ADOPT): RequestState.RUNNING,
    (RequestState.RECEIVED, RequestEvent.FAIL): RequestState.FAILED,
    (RequestState.RECEIVED, RequestEvent.CANCEL): RequestState.CANCELLED,
    (RequestState.RECEIVED, RequestEvent.HAND_BACK): RequestState.HANDED_BACK,
    (RequestState.WAITING, RequestEvent.PLACE): RequestState.PLACING,
    (RequestState.WAITING, RequestEvent.FAIL): RequestState.FAILED,
    (RequestState.WAITING, RequestEvent.CANCEL): RequestState.CANCELLED,
    (RequestState.WAITING, RequestEvent.HAND_BACK): RequestState.HANDED_BACK,
    (RequestState.PLACING, RequestEvent.ACCEPT): RequestState.RUNNING,
    (RequestState.PLACING, RequestEvent.WAIT): RequestState.WAITING,
    (RequestState.PLACING, RequestEvent.FAIL): RequestState.FAILED,
    (RequestState.PLACING, RequestEvent.CANCEL): RequestState.CANCELLED,
    (RequestState.PLACING, RequestEvent.HAND_BACK): RequestState.HANDED_BACK,
    (RequestState.RUNNING, RequestEvent.RESPLIT): RequestState.RUNNING,
    (RequestState.RUNNING, RequestEvent.RESUME): RequestState.PLACING,
    (RequestState.RUNNING, RequestEvent.FINISH): RequestState.FINISHED,
    (RequestState.RUNNING, RequestEvent.FAIL): RequestState.FAILED,
    (RequestState.RUNNING, RequestEvent.CANCEL): RequestState.CANCELLED,
    (RequestState.RUNNING, RequestEvent.HAND_BACK): RequestState.HANDED_BACK,
}

TERMINAL = frozenset({RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED, RequestState.HANDED_BACK})
