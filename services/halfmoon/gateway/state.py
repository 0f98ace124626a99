"""One HTTP request's life, as data."""

from enum import Enum

from halfmoon.machine import Table


class Phase(Enum):
    CHECKING = "checking"
    """Body, key, parameters, tokens, limits. Nobody else has heard of the request."""
    WAITING = "waiting"
    """Published; no token has come yet. Its HTTP status is still open."""
    ANSWERING = "answering"
    """At least one token has come; a stream's status line is out."""
    DONE = "done"
    REJECTED = "rejected"
    """Ended here, unpublished."""
    FAILED = "failed"
    ABANDONED = "abandoned"
    """The client left, or the gateway stops: cancelled wherever it runs."""


class Sign(Enum):
    """What happens to a request."""

    REJECT = "reject"
    SUBMIT = "submit"
    FIRST_TOKEN = "first token"
    FINISH = "finish"
    FAIL = "fail"
    LEAVE = "leave"


LIFE: Table[Phase, Sign] = {
    (Phase.CHECKING, Sign.REJECT): Phase.REJECTED,
    (Phase.CHECKING, Sign.SUBMIT): Phase.WAITING,
    (Phase.CHECKING, Sign.LEAVE): Phase.ABANDONED,
    (Phase.WAITING, Sign.FIRST_TOKEN): Phase.ANSWERING,
    (Phase.WAITING, Sign.FINISH): Phase.DONE,
    (Phase.WAITING, Sign.FAIL): Phase.FAILED,
    (Phase.WAITING, Sign.LEAVE): Phase.ABANDONED,
    (Phase.ANSWERING, Sign.FINISH): Phase.DONE,
    (Phase.ANSWERING, Sign.FAIL): Phase.FAILED,
    (Phase.ANSWERING, Sign.LEAVE): Phase.ABANDONED,
}

TERMINAL = frozenset({Phase.DONE, Phase.REJECTED, Phase.FAILED, Phase.ABANDONED})
