"""Prefill workers that somebody here waits for: when each was last heard."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from halfmoon.bus.codec import Decoder
from halfmoon.bus.errors import Undecodable
from halfmoon.bus.protocol import Bus, BusMessage, Subscription
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import WorkerId
from halfmoon.schemas.members import MEMBER_LOST_AFTER_S, Goodbye, Heartbeat


class PeerWatch:
    """Follows the heartbeats of the workers that are watched, and skips all others unread."""

    def __init__(self, bus: Bus, now_s: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._now_s = now_s
        self._decoder: Decoder[Heartbeat] = Decoder(Heartbeat)
        self._watchers: Counter[str] = Counter()
        self._heard_s: dict[str, float] = {}
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        self._subscription = await self._bus.subscribe(subjects.HEARTBEAT_ALL, self._on_heartbeat)

    async def stop(self) -> None:
        """Idempotent."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.unsubscribe()

    @contextmanager
    def watching(self, worker: WorkerId) -> Iterator[None]:
        subject = subjects.heartbeat(worker)
        self._watchers[subject] += 1
        self._heard_s.setdefault(subject, self._now_s())
        try:
            yield
        finally:
            self._watchers[subject] -= 1
            if not self._watchers[subject]:
                del self._watchers[subject]
                del self._heard_s[subject]

    def heard_s(self, worker: WorkerId) -> float:
        """When a watched worker was last heard, on the monotonic clock; at first, when the watch began."""
        return self._heard_s[subjects.heartbeat(worker)]

    def hear(self, worker: WorkerId) -> None:
        """It gave another sign of life than a heartbeat."""
        self._hear(subjects.heartbeat(worker), self._now_s())

    async def _on_heartbeat(self, message: BusMessage) -> None:
        if message.subject not in self._watchers:
            return
        try:
            beat = self._decoder.decode(message.data, message.headers)
        except Undecodable:
            return
        # Who says goodbye is as good as lost already: only the grace for its successor is left.
        self._hear(message.subject, self._now_s() - (MEMBER_LOST_AFTER_S if isinstance(beat, Goodbye) else 0.0))

    def _hear(self, subject: str, at_s: float) -> None:
        if subject in self._watchers:
            self._heard_s[subject] = at_s
