"""What transports share: results, and copying that lets other threads run."""

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from halfmoon.transport.protocol import ReadOutcome, SliceRead, SliceResult


def failed(outcome: ReadOutcome, detail: str, started_ns: int | None = None) -> SliceResult:
    """A result without bytes."""
    now_ns = time.time_ns()
    return SliceResult(outcome, now_ns if started_ns is None else started_ns, now_ns, detail)


def all_failed(slices: Sequence[SliceRead], outcome: ReadOutcome, detail: str) -> list[SliceResult]:
    return [failed(outcome, detail) for _ in slices]


def copy(destination: memoryview, source: memoryview) -> None:
    """One copy without the interpreter lock (assigning memoryviews would hold it for the whole copy)."""
    np.copyto(np.frombuffer(destination, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def seconds_left(deadline_ns: int) -> float:
    """Until a Unix time; negative when it has passed."""
    return (deadline_ns - time.time_ns()) / 1e9


async def ended(work: asyncio.Future[list[SliceResult]]) -> None:
    """Wait until a thread's work is over, whatever cancels us meanwhile; then let the cancellation through.

    Used after the thread was told to stop: the destinations are the caller's again only when it has.
    """
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
