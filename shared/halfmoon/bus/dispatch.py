"""From the wire to a handler: a bounded queue, and the tasks that empty it. Both buses use it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import structlog

from halfmoon.bus.protocol import DEFAULT_MAX_PENDING, DEFAULT_MAX_PENDING_BYTES, DRAIN_TIMEOUT_S

T = TypeVar("T")

_log = structlog.stdlib.get_logger(__name__)


class Dispatcher(Generic[T]):
    """Hands items to a handler in order, `concurrency` at a time. Must be made while the event loop runs."""

    def __init__(
        self,
        name: str,
        handler: Callable[[T], Awaitable[None]],
        *,
        concurrency: int = 1,
        max_pending: int = DEFAULT_MAX_PENDING,
        max_pending_bytes: int = DEFAULT_MAX_PENDING_BYTES,
    ) -> None:
        if concurrency < 1 or max_pending < 1:
            raise ValueError(f"concurrency and max_pending are at least 1, got {concurrency} and {max_pending}")
        self._name = name
        self._handler = handler
        self._max_pending = max_pending
        self._max_pending_bytes = max_pending_bytes
        self._queue: asyncio.Queue[tuple[T, int]] = asyncio.Queue()
        self._pending_bytes = 0
        self._running = 0
        self._stopped = False
        self.dropped = 0
        self.failed = 0
        self._tasks = [asyncio.create_task(self._run(), name=f"bus {name} {i}") for i in range(concurrency)]

    @property
    def pending(self) -> int:
        return self._queue.qsize() + self._running

    @property
    def stopped(self) -> bool:
        return self._stopped

    def offer(self, item: T, num_bytes: int) -> bool:
        """Queue `item`. False, and counted, where that would be one too many, or one byte."""
        if self._stopped:
            return False
        full = self._queue.qsize() >= self._max_pending
        if full or (self._pending_bytes and self._pending_bytes + num_bytes > self._max_pending_bytes):
            self.dropped += 1
            if self.dropped == 1 or self.dropped % 1000 == 0:
                _log.warning("messages dropped: their handler is too slow", subject=self._name, dropped=self.dropped)
            return False
        self._pending_bytes += num_bytes
        self._queue.put_nowait((item, num_bytes))
        return True

    async def _run(self) -> None:
        while True:
            item, num_bytes = await self._queue.get()
            self._pending_bytes -= num_bytes
            self._running += 1
            try:
                await self._handler(item)
            except asyncio.CancelledError:
                if _being_cancelled():
                    raise
                self.failed += 1
                _log.exception("a message handler was cancelled from within", subject=self._name, failed=self.failed)
            except Exception:
                self.failed += 1
                _log.exception("a message handler failed", subject=self._name, failed=self.failed)
            finally:
                self._running -= 1
                self._queue.task_done()

    async def join(self, timeout_s: float) -> bool:
        """Wait until nothing is pending. False where that took longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._queue.join()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Discard what waits, cancel what runs, and wait for its end; but not for a handler that calls this itself."""
        self._stopped = True
        while not self._queue.empty():
            self._queue.get_nowait()
            self._queue.task_done()
        self._pending_bytes = 0
        others = [task for task in self._tasks if task is not asyncio.current_task()]
        self._tasks = [task for task in self._tasks if task is asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def _being_cancelled() -> bool:
    """Whether the running task itself is to end; otherwise a `CancelledError` came from something that it awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class DispatchedSubscription(Generic[T]):
    """`Subscription` over a dispatcher. `end_interest(gently)` tells the broker to send no more."""

    def __init__(self, dispatcher: Dispatcher[T], end_interest: Callable[[bool], Awaitable[None]]) -> None:
        self._dispatcher = dispatcher
        self._end_interest = end_interest
        self._ended = False

    @property
    def pending(self) -> int:
        return self._dispatcher.pending

    @property
    def dropped(self) -> int:
        return self._dispatcher.dropped

    @property
    def failed(self) -> int:
        return self._dispatcher.failed

    @property
    def active(self) -> bool:
        return not self._ended and not self._dispatcher.stopped

    async def unsubscribe(self) -> None:
        await self._end(gently=False)
        await self._dispatcher.stop()

    async def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._end(gently=True)
                await self._dispatcher.join(timeout_s)
        except TimeoutError:
            _log.warning("a subscription's handler was cut off", pending=self.pending)
        finally:
            await self._dispatcher.stop()

    async def _end(self, *, gently: bool) -> None:
        if not self._ended:
            self._ended = True
            await self._end_interest(gently)
