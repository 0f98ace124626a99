"""Workers at the other end of a transfer, for as long as somebody here waits for them: whether they are still there.

While nobody at all is heard (a worker hears its own heartbeats), the silence is the broker's: nobody is judged by it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from halfmoon.bus.codec import Decoder
from halfmoon.bus.errors import Undecodable
from halfmoon.bus.protocol import Bus, BusMessage, Subscription
from halfmoon.lifecycle.listening import ListeningClock
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import WorkerId
from halfmoon.schemas.members import MEMBER_LOST_AFTER_S, Goodbye, Heartbeat


@dataclass(slots=True)
class _Peer:
    heard_s: float
    """On the clock of the watch."""
    num_watchers: int = 0
    started_ns: int | None = None
    """Of the life that was heard last; None before its first heartbeat."""
    num_restarts: int = 0


class Watched:
    """One watch on one worker."""

    def __init__(self, watch: "PeerWatch", peer: _Peer) -> None:
        self._watch = watch
        self._peer = peer
        self._num_restarts = peer.num_restarts

    @property
    def silent_s(self) -> float:
        """For how long others have been heard, and not this worker; at first, since the watch began."""
        return self._watch.listened_s - self._peer.heard_s

    @property
    def was_restarted(self) -> bool:
        """Whether it is in another life than when this watch began: what it had then, it has no more."""
        return self._peer.num_restarts > self._num_restarts


class PeerWatch:
    """Follows the heartbeats of the workers that are watched, and skips all others unread."""

    def __init__(self, bus: Bus, now_s: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._now_s = now_s
        self._decoder: Decoder[Heartbeat] = Decoder(Heartbeat)
        self._peers: dict[str, _Peer] = {}
        self._clock = ListeningClock()
        self._clock.hear(now_s())
        self.num_heard = 0
        """Heartbeats, of anybody."""
        self._subscription: Subscription | None = None

    @property
    def listened_s(self) -> float:
        """For how long, in all, others could be heard."""
        return self._clock.listened_s

    def __len__(self) -> int:
        """Number of workers that are watched."""
        return len(self._peers)

    async def start(self) -> None:
        self._subscription = await self._bus.subscribe(subjects.HEARTBEAT_ALL, self._on_heartbeat)

    async def stop(self) -> None:
        """Idempotent."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.unsubscribe()

    @contextmanager
    def watching(self, worker: WorkerId) -> Iterator[Watched]:
        subject = subjects.heartbeat(worker)
        peer = self._peers.setdefault(subject, _Peer(self.listened_s))
        peer.num_watchers += 1
        try:
            yield Watched(self, peer)
        finally:
            peer.num_watchers -= 1
            if not peer.num_watchers:
                del self._peers[subject]

    def hear(self, worker: WorkerId) -> None:
        """It gave another sign of life than a heartbeat."""
        peer = self._peers.get(subjects.heartbeat(worker))
        if peer is not None:
            peer.heard_s = self.listened_s

    async def _on_heartbeat(self, message: BusMessage) -> None:
        self.num_heard += 1
        heard_s = self._clock.hear(self._now_s())
        peer = self._peers.get(message.subject)
        if peer is None:
            return
        try:
            beat = self._decoder.decode(message.data, message.headers)
        except Undecodable:
            return
        peer.heard_s = heard_s
        if isinstance(beat, Goodbye):
            # As good as lost already: only the grace for its successor is left.
            peer.heard_s -= MEMBER_LOST_AFTER_S
        elif beat.started_ns != peer.started_ns:
            peer.num_restarts += peer.started_ns is not None
            peer.started_ns = beat.started_ns
