"""Calls that are let finish although nobody waits for them any more."""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


class Outstanding:
    """Bounds and owns calls that must not be cancelled half-way. Their callers give up; the calls go on."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tasks: set[asyncio.Task[object]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    async def wait(self, call: Coroutine[None, None, T], timeout_s: float) -> T:
        """The call's result. Raises TimeoutError after `timeout_s`, and at once where too many are unanswered."""
        if len(self._tasks) >= self._limit:
            call.close()
            raise TimeoutError(f"{len(self._tasks)} earlier questions are unanswered")
        task = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise TimeoutError
        return task.result()

    async def close(self, timeout_s: float) -> None:
        """Wait for all of them; what is not done in time is cancelled after all."""
        tasks = tuple(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen, so that it isn't reported as lost where the caller has given up
