"""The owner of a worker's request tasks: one task per half, one way to stop it, and none left behind.

1. `start` makes the task. A job's coroutine catches its own errors; one that doesn't is a bug, and is told to `on_bug`.
2. `Job.stop` cancels it, once, with the error that it is to report. A second stop changes nothing: cleanup isn't cut.
3. `drain` waits for what runs; `close` stops everything and waits for its end.
"""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Generic, TypeVar

from halfmoon.schemas.wire import Error, ErrorCode

K = TypeVar("K", bound=Hashable)


class Job:
    """One half's task, and whether and why it was stopped."""

    __slots__ = ("_sealed", "_task", "is_stopped", "stop_error")

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._sealed = False
        self.is_stopped = False
        self.stop_error: Error | None = None
        """What to report, where it was stopped; None where it is to end without an error."""

    def begin(self) -> None:
        """To be called first inside the job: from here on, `stop` interrupts it.

        Raises CancelledError where it was stopped before it ran. (Cancelling a task that has not run yet would end it
        without a chance to report anything.)
        """
        self._task = asyncio.current_task()
        if self.is_stopped:
            raise asyncio.CancelledError

    def stop(self, error: Error | None) -> bool:
        """Interrupt the job. False where it has been stopped, or is ending."""
        if self._sealed or self.is_stopped:
            return False
        self.is_stopped = True
        self.stop_error = error
        if self._task is not None:
            self._task.cancel()
        return True

    def seal(self) -> None:
        """The result is decided; only cleanup is left, which nobody may cut off."""
        self._sealed = True
        if self._task is not None:
            while self._task.cancelling():
                self._task.uncancel()


class Jobs(Generic[K]):
    """All tasks of a service, by key."""

    def __init__(self, on_bug: Callable[[BaseException], None]) -> None:
        self._running: dict[K, tuple[Job, asyncio.Task[None]]] = {}
        self._on_bug = on_bug

    def __len__(self) -> int:
        return len(self._running)

    def start(self, key: K, job: Job, run: Coroutine[None, None, None], *, name: str) -> None:
        """Run it. Raises ValueError where the key is in use."""
        if key in self._running:
            run.close()
            raise ValueError(f"job {key!r} runs already")
        task = asyncio.create_task(run, name=name)
        self._running[key] = (job, task)
        task.add_done_callback(lambda done: self._ended(key, done))

    async def drain(self) -> None:
        """Wait until nothing runs. Bounded by the caller."""
        while self._running:
            await asyncio.wait([task for _, task in self._running.values()])

    async def close(self, reason: str) -> None:
        """Stop everything and wait for its end. Idempotent."""
        error = Error(code=ErrorCode.UNAVAILABLE, message=reason)
        for job, _ in list(self._running.values()):
            job.stop(error)
        await self.drain()

    def _ended(self, key: K, task: asyncio.Task[None]) -> None:
        self._running.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_bug(error)
