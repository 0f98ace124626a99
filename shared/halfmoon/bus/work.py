"""The deliveries that one process holds of a work queue, and the handlers that run on them."""

import asyncio
from collections.abc import Callable

import structlog

from halfmoon.bus.errors import BusError
from halfmoon.bus.protocol import BusMessage, Delivery, DeliveryHandler, Settle, Settlement

_log = structlog.stdlib.get_logger(__name__)

_NAK_AFTER_FAILURE_S = 1.0


class WorkSet:
    """Counts a delivery as held until it is settled, or until the broker takes it back after `ack_wait_s`."""

    def __init__(
        self,
        stream: str,
        handler: DeliveryHandler,
        *,
        ack_wait_s: float,
        max_outstanding: int,
        on_room: Callable[[], None],
        now: Callable[[], float] | None = None,
    ) -> None:
        if max_outstanding < 1:
            raise ValueError(f"max_outstanding is at least 1, got {max_outstanding}")
        self._stream = stream
        self._handler = handler
        self._ack_wait_s = ack_wait_s
        self._max_outstanding = max_outstanding
        self._on_room = on_room
        self._now = now if now is not None else asyncio.get_running_loop().time
        self._held: dict[Delivery, float] = {}
        """Each unsettled delivery, and the time at which the broker takes it back."""
        self._running: set[asyncio.Task[None]] = set()
        self.failed = 0

    @property
    def num_held(self) -> int:
        return len(self._held)

    def room(self) -> int:
        """How many more deliveries may be accepted."""
        now = self._now()
        for delivery in [delivery for delivery, until in self._held.items() if until <= now]:
            del self._held[delivery]
        return max(0, self._max_outstanding - len(self._held))

    def accept(self, message: BusMessage, *, receipt: str, stream_seq: int, num_delivered: int, settle: Settle) -> None:
        """Start the handler on a delivery whose settlement goes out through `settle`."""

        async def settle_and_forget(settlement: Settlement, delay_s: float) -> None:
            if settlement is Settlement.IN_PROGRESS:
                self._hold(delivery)
            else:
                self._held.pop(delivery, None)
                self._on_room()
            await settle(settlement, delay_s)

        delivery = Delivery(
            message, receipt=receipt, stream_seq=stream_seq, num_delivered=num_delivered, settle=settle_and_forget
        )
        self._hold(delivery)
        task = asyncio.create_task(self._handle(delivery), name=f"work {self._stream} {stream_seq}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def join(self, timeout_s: float) -> None:
        """Wait for running handlers, at most `timeout_s`."""
        others = self._others()
        if others:
            await asyncio.wait(others, timeout=timeout_s)

    async def stop(self) -> None:
        """Cancel running handlers. What they held comes again, here or elsewhere."""
        others = self._others()
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _others(self) -> set[asyncio.Task[None]]:
        return {task for task in self._running if task is not asyncio.current_task()}

    def _hold(self, delivery: Delivery) -> None:
        self._held[delivery] = self._now() + self._ack_wait_s

    async def _handle(self, delivery: Delivery) -> None:
        try:
            await self._handler(delivery)
        except Exception:
            self.failed += 1
            _log.exception("a work handler failed", stream=self._stream, seq=delivery.stream_seq)
            try:
                await delivery.nak(_NAK_AFTER_FAILURE_S)
            except BusError as error:
                # It comes again all the same, when ack_wait is over.
                _log.debug("a delivery could not be given back", seq=delivery.stream_seq, error=str(error))
