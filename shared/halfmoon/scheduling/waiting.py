"""Where admitted requests wait for workers with room: bounded, in fair order, and knowing how long it takes. Pure.

enter ─▶ waiting ─ its turn, and room ─▶ serve
            ├─ cancelled, out of time ─▶ leave
            └─ too many ──────────────▶ turned away by a later one's `enter`
"""

import math
from collections.abc import Mapping
from typing import Generic, TypeVar

from halfmoon.scheduling.fairness import FairQueue, Share
from halfmoon.scheduling.service_class import ServiceClass

K = TypeVar("K")

OUTPUT_WEIGHT = 2.0
"""What a generated token counts, against one of a prompt: as in the paper on virtual token counters, §4."""
RATE_TIME_S = 10.0
"""The rate at which requests leave is that of about so long."""
MIN_SERVED = 4
"""Requests from which a rate is taken at least."""


class _Rate:
    """Tokens a second, of late: each counts less the longer ago it was."""

    def __init__(self, now_s: float) -> None:
        self._begin_s = self._at_s = now_s
        self._tokens = 0.0
        self._num = 0

    def add(self, num_tokens: int, now_s: float) -> None:
        self._tokens = self._left(now_s) + num_tokens
        self._at_s = now_s
        self._num += 1

    def per_s(self, now_s: float) -> float | None:
        """None where too little was seen."""
        seen_s = RATE_TIME_S * -math.expm1((self._begin_s - now_s) / RATE_TIME_S)
        return self._left(now_s) / seen_s if self._num >= MIN_SERVED and seen_s > 0.0 else None

    def _left(self, now_s: float) -> float:
        return self._tokens * math.exp((self._at_s - now_s) / RATE_TIME_S)


class WaitingRoom(Generic[K]):
    """For the requests of one model. `max_waiting` 0: nobody may wait."""

    def __init__(
        self, classes: Mapping[str, ServiceClass], tenant_weights: Mapping[str, float], max_waiting: int
    ) -> None:
        self._queue: FairQueue[K] = FairQueue({name: each.weight for name, each in classes.items()}, tenant_weights)
        self._max_waiting = max_waiting
        self._rate = _Rate(0.0)

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, item: K) -> bool:
        return item in self._queue

    @property
    def is_overfull(self) -> bool:
        return len(self._queue) > self._max_waiting

    def enter(
        self, item: K, share: Share, *, num_tokens: int, arrived_s: float, now_s: float, priority: int = 0
    ) -> None:
        """Begin to wait; or to be the next, where nobody waits. Afterwards, see `is_overfull`."""
        if not len(self._queue):
            self._rate = _Rate(now_s)
        self._queue.put(item, share, num_tokens=num_tokens, arrival=arrived_s, priority=priority)

    def next(self) -> K | None:
        """Whose turn it is, as soon as there is room."""
        return self._queue.peek()

    def serve(self, now_s: float) -> K | None:
        """The next one leaves, since there is room for it."""
        item = self._queue.peek()
        if item is not None:
            self._rate.add(self._queue.num_tokens(item), now_s)
            self._queue.pop()
        return item

    def leave(self, item: K) -> bool:
        """It waits no more, unserved. False: it did not wait."""
        return self._queue.remove(item)

    def surplus(self) -> K | None:
        """Whom to turn away where too many wait; see `FairQueue.last`."""
        return self._queue.last() if self.is_overfull else None

    def charge_output(self, share: Share, num_tokens: int) -> None:
        """Generated for a request that was served."""
        self._queue.charge(share, OUTPUT_WEIGHT * num_tokens)

    def charge_prompt(self, share: Share, num_tokens: int) -> None:
        """Of a request that another conductor served."""
        self._queue.charge(share, num_tokens)

    def expected_wait_s(self, item: K, now_s: float) -> float | None:
        """How long it will still wait, by what is before it and how fast that has gone. None: not known yet."""
        rate = self._rate.per_s(now_s)
        return self._queue.tokens_before(item) / rate if rate else None

    def waiting(self) -> dict[Share, int]:
        return self._queue.waiting()
