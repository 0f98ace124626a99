"""When the tokens of one half came."""

import time


class TokenTimes:
    """Unix nanoseconds, from the half's acceptance on."""

    def __init__(self) -> None:
        self.accepted_ns = time.time_ns()
        self._first_ns: int | None = None
        self._last_ns: int | None = None
        self._num_gaps = 0

    @property
    def has_begun(self) -> bool:
        return self._first_ns is not None

    def token(self) -> bool:
        """One has come. Whether another came before it, so that there is a time between the two."""
        self._last_ns = time.time_ns()
        if self._first_ns is None:
            self._first_ns = self._last_ns
            return False
        self._num_gaps += 1
        return True

    def since_accepted_s(self) -> float:
        return (time.time_ns() - self.accepted_ns) / 1e9

    def first_s(self) -> float | None:
        """From acceptance to the first token; None where there was none."""
        return None if self._first_ns is None else (self._first_ns - self.accepted_ns) / 1e9

    def mean_gap_s(self) -> float | None:
        """Between tokens, on average; None where fewer than two came."""
        if not self._num_gaps or self._first_ns is None or self._last_ns is None:
            return None
        return (self._last_ns - self._first_ns) / 1e9 / self._num_gaps
