"""Where one request's events wait for their reader."""

import asyncio
from collections import deque

from halfmoon.schemas.ids import RequestId
from halfmoon.schemas.requests import Failed, TokenEvent
from halfmoon.schemas.wire import Error, ErrorCode


class Mailbox:
    """Bounded: a reader that falls too far behind gets an error, and costs the others nothing."""

    def __init__(self, request_id: RequestId, max_events: int) -> None:
        self._request_id = request_id
        self._max_events = max_events
        self._events: deque[TokenEvent] = deque()
        self._ended: Failed | None = None
        self._arrived = asyncio.Event()

    @property
    def pending(self) -> int:
        return len(self._events)

    @property
    def ended(self) -> Failed | None:
        """The error that `end` left: made on this side, so the request may still be running."""
        return self._ended

    def put(self, event: TokenEvent) -> None:
        if self._ended is not None:
            return
        if len(self._events) >= self._max_events:
            self.end(
                ErrorCode.OVERLOADED,
                f"the reader is too slow: {self._max_events} events wait for it; read faster, or ask for fewer tokens",
            )
            return
        self._events.append(event)
        self._arrived.set()

    def end(self, code: ErrorCode, message: str) -> None:
        """Nothing more will come: after what waits, the reader gets this."""
        if self._ended is None:
            self._ended = Failed(request_id=self._request_id, error=Error(code=code, message=message))
            self._arrived.set()

    async def get(self) -> TokenEvent:
        """The next event. After `end`, its error, each time."""
        while not self._events:
            if self._ended is not None:
                return self._ended
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()
