"""Virtual time: events in the order of their moments; of those at one moment, the one scheduled first."""

import heapq
from collections.abc import Callable


class Clock:
    """Nothing runs but what was scheduled, so the same events give the same run."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._num_scheduled = 0

    def at(self, moment_s: float, action: Callable[[], None]) -> None:
        """Do this then; at once where that is past."""
        self._num_scheduled += 1
        heapq.heappush(self._queue, (max(moment_s, self.now_s), self._num_scheduled, action))

    def step(self) -> bool:
        """Pass to the next event. Whether there was one."""
        if not self._queue:
            return False
        self.now_s, _, action = heapq.heappop(self._queue)
        action()
        return True

    def __len__(self) -> int:
        return len(self._queue)
