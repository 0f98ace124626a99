"""Whose silence counts. Pure: it is told the time."""

from halfmoon.schemas.members import MEMBER_LOST_AFTER_S

DEAF_AFTER_S = MEMBER_LOST_AFTER_S / 2


class ListeningClock:
    """Stands still while nobody at all is heard.

    Every process hears its own heartbeats as well. So where none has come for longer than `DEAF_AFTER_S`, the fault is
    on this side, or the broker's: that time is nobody's silence. How long a member has been silent is `listened_s`,
    less what it was when the member was last heard.
    """

    def __init__(self) -> None:
        self.listened_s = 0.0
        """For how long, in all, others could be heard."""
        self._heard_s: float | None = None

    def hear(self, now_s: float) -> float:
        """Somebody was heard. Returns `listened_s`."""
        gap_s = 0.0 if self._heard_s is None else now_s - self._heard_s
        if gap_s <= DEAF_AFTER_S:
            self.listened_s += gap_s
        self._heard_s = now_s
        return self.listened_s
