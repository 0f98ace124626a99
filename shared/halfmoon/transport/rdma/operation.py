"""One `read`, as its thread and whoever waits for it share it."""

import time


class Operation:
    """Has a deadline, and may be ended before: a flag that one thread sets and another looks at."""

    def __init__(self, deadline_ns: int) -> None:
        self._deadline_ns = deadline_ns
        self._is_given_up = False

    def give_up(self) -> None:
        """Make the thread return soon."""
        self._is_given_up = True

    @property
    def ended(self) -> bool:
        return self._is_given_up or time.time_ns() >= self._deadline_ns

    def seconds_left(self, at_most_s: float) -> float:
        """For a step that may itself take no longer than `at_most_s`; 0 where there is no time."""
        if self._is_given_up:
            return 0.0
        return min(at_most_s, max(0.0, (self._deadline_ns - time.time_ns()) / 1e9))
