"""A line of waiting tasks: first come, first served, and each level of priority is a head start."""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

HEAD_START_S = 10.0
"""A task counts as having come so much earlier for each level of its priority. So whoever is overtaken is so only by
those who come within that time, and nobody starves."""

Rank = tuple[float, int]
"""(time of arrival, less the head start; arrival number): the smallest is first."""


class Line:
    """Tasks that wait until something that is shared has room for them.

    Whoever is first in line tries, and tries again at each `wake`; nobody overtakes, so the large are not starved by
    the small. The waiting is bounded by the caller's own timeout.
    """

    def __init__(self, head_start_s: float = HEAD_START_S) -> None:
        self._head_start_s = head_start_s
        self._arrivals = itertools.count()
        self._waiting: list[tuple[Rank, asyncio.Future[None]]] = []

    def __len__(self) -> int:
        return sum(not turn.done() for _, turn in self._waiting)

    async def enter(self, attempt: Callable[[], bool], *, priority: int = 0) -> None:
        """Return once `attempt`, called when it is this task's turn, has returned True."""
        now_s = asyncio.get_running_loop().time()
        rank = (now_s - priority * self._head_start_s, next(self._arrivals))
        while not (self._is_first(rank) and attempt()):
            await self._turn(rank)
        self.wake()

    def wake(self) -> None:
        """Let the first in line try: there may be room."""
        while self._waiting:
            _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return

    def _is_first(self, rank: Rank) -> bool:
        return all(rank < other for other, turn in self._waiting if not turn.done())

    async def _turn(self, rank: Rank) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (rank, turn))
        try:
            await turn
        except asyncio.CancelledError:
            turn.cancel()
            self.wake()
            raise


class Places:
    """So many tasks at a time; the others wait in line."""

    def __init__(self, limit: int, head_start_s: float = HEAD_START_S) -> None:
        self._limit = limit
        self._line = Line(head_start_s)
        self.num_taken = 0

    @asynccontextmanager
    async def place(self, *, priority: int = 0) -> AsyncIterator[None]:
        await self._line.enter(self._take, priority=priority)
        try:
            yield
        finally:
            self.num_taken -= 1
            self._line.wake()

    def _take(self) -> bool:
        if self.num_taken >= self._limit:
            return False
        self.num_taken += 1
        return True
