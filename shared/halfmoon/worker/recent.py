"""What has ended here lately, so that a repeated message doesn't do it again."""

from halfmoon.schemas.ids import TransferId


class RecentTransfers:
    """The last so many transfers, each with its latest attempt."""

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._attempts: dict[TransferId, int] = {}

    def add(self, transfer_id: TransferId, attempt: int) -> None:
        attempt = max(attempt, self._attempts.pop(transfer_id, attempt))
        self._attempts[transfer_id] = attempt
        if len(self._attempts) > self._limit:
            del self._attempts[next(iter(self._attempts))]

    def has(self, transfer_id: TransferId, attempt: int) -> bool:
        """Whether this attempt, or a later one, has been here."""
        known = self._attempts.get(transfer_id)
        return known is not None and attempt <= known
