"""Whether this worker's word still counts.

A worker that was cut off from the broker, or stood still, may have been taken for lost, and its requests may go on
elsewhere. Each client must hear one end only: so before such a worker speaks again, it asks the conductors.
"""

import asyncio
import time

import structlog

from halfmoon.bus.endpoint import call
from halfmoon.bus.errors import BusError, BusTimeout, NoResponders, RemoteError
from halfmoon.bus.protocol import Bus
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import WorkerId
from halfmoon.schemas.members import HEARTBEAT_INTERVAL_S, MEMBER_LOST_AFTER_S
from halfmoon.schemas.splits import DecodeHalf, HalfClaim, HalfClaimed

DOUBT_AFTER_S = MEMBER_LOST_AFTER_S / 2
"""So long without the broker's answer, others may soon miss this worker's heartbeats."""
CLAIM_TIMEOUT_S = 0.5
MAX_SILENCES = 4
"""A claim that so often nobody answers is of a request that no conductor has. If the work queue still has it, nobody
has ended it, and who takes it next adopts it from here."""


class Standing:
    """Of one worker. `run` keeps asking the broker whether it is there; what it has answered, it had heard before."""

    def __init__(self, bus: Bus, worker: WorkerId, log: structlog.stdlib.BoundLogger) -> None:
        self._bus = bus
        self._worker = worker
        self._log = log
        self._answered_s = time.monotonic()
        """When that was sent which the broker answered last."""
        self._is_doubtful = False
        self._num_doubts = 0

    async def run(self) -> None:
        while True:
            asked_s = time.monotonic()
            try:
                await self._bus.flush(DOUBT_AFTER_S)
            except BusError:
                self.num_doubts()
            else:
                self.num_doubts()
                self._answered_s, self._is_doubtful = asked_s, False
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    @property
    def is_doubtful(self) -> bool:
        """Whether the broker has said nothing since it may have been taken for lost."""
        self.num_doubts()
        return self._is_doubtful

    def num_doubts(self) -> int:
        """How often this worker may have been taken for lost, now included."""
        if not self._is_doubtful and time.monotonic() - self._answered_s > DOUBT_AFTER_S:
            self._is_doubtful = True
            self._num_doubts += 1
            self._log.warning("cut off, or stood still: what runs here is asked for before it goes on")
        return self._num_doubts

    async def claim(self, half: DecodeHalf) -> bool:
        """Whether the request is still this worker's to end. Waits while the bus is away, and while nobody can tell:
        the caller bounds that by the deadline."""
        num_silences = 0
        while num_silences < MAX_SILENCES:
            question = HalfClaim(
                request_id=half.request_id,
                transfer_id=half.transfer_id,
                worker=self._worker,
                is_repeated=num_silences > 0,
            )
            try:
                answer = await call(self._bus, subjects.CLAIM, question, HalfClaimed, timeout_s=CLAIM_TIMEOUT_S)
            except NoResponders:
                break
            except BusTimeout:
                num_silences += 1
            except (BusError, RemoteError):
                await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            else:
                if not answer.is_held:
                    self._log.warning("dropped: it goes on elsewhere, or has ended", request_id=half.request_id)
                return answer.is_held
        return await self._is_queued(half)

    async def _is_queued(self, half: DecodeHalf) -> bool:
        """Waits while the bus is away."""
        while half.queue_seq is not None:
            try:
                is_queued = await self._bus.stream_has(subjects.REQUESTS_STREAM, half.queue_seq)
            except BusError:
                await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            else:
                if not is_queued:
                    self._log.warning("dropped: another has ended it", request_id=half.request_id)
                return is_queued
        return True


class Claims:
    """Of one half: asks no more often than there was reason to."""

    def __init__(self, standing: Standing, half: DecodeHalf) -> None:
        self._standing = standing
        self._half = half
        # What waited in the inbox while this worker stood still may be elsewhere by now, too.
        self._num_settled = standing.num_doubts() - standing.is_doubtful

    async def is_held(self) -> bool:
        """To be asked right before each word to the client."""
        while (num_doubts := self._standing.num_doubts()) != self._num_settled:
            if not await self._standing.claim(self._half):
                return False
            self._num_settled = num_doubts
        return True
