"""What the owner of a running request does next: facts to one step. Pure.

The decode worker ends the request, and says so. Everything here is about it not doing that.
"""

from dataclasses import dataclass

UNSHOWN_BEATS = 8
"""So many heartbeats in a row without a request: their worker doesn't have it, or not any more. Two seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    now_ns: int
    deadline_ns: int
    grace_ns: int
    has_ended: bool = False
    """The decode worker said so."""
    is_certain: bool = True
    """It is known to have had the request."""
    num_unshown_beats: int = 0
    """Its last heartbeats, in a row, that did not name the request."""
    is_decode_lost: bool = False
    is_prefill_lost: bool = False
    is_cancelled: bool = False
    is_cancel_sent: bool = False
    late_since_ns: int | None = None
    can_move: bool = True
    """It has not moved too often already."""
    is_handed_back: bool = False
    is_taken: bool = False
    """Another conductor owns it: that one says what is to be said."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The client has its terminal message."""

    is_heard: bool
    """False: concluded from the heartbeats, because the message was lost."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Another decode worker goes on."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Nobody else can end it, and nobody takes over: it failed with the decode worker, or was cancelled meanwhile."""

    is_cancelled: bool
    is_late: bool


@dataclass(frozen=True, slots=True)
class Resplit:
    """Another prefill worker provides the KV, or decode is told that nobody does."""


@dataclass(frozen=True, slots=True)
class TellCancel:
    """To both workers, directly: the general cancel may have come before the half did."""

    is_late: bool


@dataclass(frozen=True, slots=True)
class HandBack:
    """This conductor stops, or another has the request; the workers go on."""


@dataclass(frozen=True, slots=True)
class Wait:
    until_ns: int


Step = Finish | Resume | GiveUp | Resplit | TellCancel | HandBack | Wait


def next_step(facts: Facts) -> Step:
    """The one thing to do now."""
    if facts.has_ended:
        return Finish(is_heard=True)
    if facts.is_taken:
        return HandBack()
    if facts.is_decode_lost:
        return _without_decode(facts)
    if facts.num_unshown_beats >= UNSHOWN_BEATS:
        return Finish(is_heard=False) if facts.is_certain else _without_decode(facts)
    if facts.is_handed_back:
        return HandBack()
    if facts.is_cancelled and not facts.is_cancel_sent:
        return TellCancel(is_late=False)
    late_ns = facts.deadline_ns + facts.grace_ns
    if facts.now_ns >= late_ns:
        if facts.late_since_ns is None:
            return TellCancel(is_late=True)
        if facts.now_ns >= facts.late_since_ns + facts.grace_ns:
            return GiveUp(is_cancelled=False, is_late=True)
        return Wait(facts.late_since_ns + facts.grace_ns)
    if facts.is_prefill_lost:
        return Resplit()
    return Wait(late_ns)


def _without_decode(facts: Facts) -> Step:
    is_late = facts.now_ns >= facts.deadline_ns
    if facts.is_cancelled or is_late or not facts.can_move:
        return GiveUp(is_cancelled=facts.is_cancelled, is_late=is_late)
    if facts.is_handed_back:
        return HandBack()
    return Resume()
