"""Decisions of the prefill service. Pure."""

from halfmoon.schemas.members import MEMBER_LOST_AFTER_S
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.splits import PrefillHalf
from halfmoon.schemas.wire import Error
from halfmoon.worker.admission import Load, busy, unservable


def refusal(half: PrefillHalf, card: ModelCard, load: Load, kv_tokens: int) -> Error | None:
    """Why this half is turned away; None where it is taken. What can never work is said before what can't work now."""
    return unservable(card, half.model, half.tokens, kv_tokens) or busy(load)


def hold_until_ns(now_ns: int, deadline_ns: int, handover_timeout_s: float) -> int:
    """Until when finished KV is held for a decode worker that says nothing: never past the request's own deadline."""
    return min(deadline_ns, now_ns + int(handover_timeout_s * 1e9))


def is_gone(silent_s: float, *, was_restarted: bool) -> bool:
    """Whether the decode worker won't read any more: lost, or in another life, which knows nothing of this half."""
    return was_restarted or silent_s > MEMBER_LOST_AFTER_S
