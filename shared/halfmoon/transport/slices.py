"""What transports share: results, sharing a batch out to threads, and copying that lets other threads run."""

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from halfmoon.transport.protocol import ReadOutcome, SliceRead, SliceResult

T = TypeVar("T")

_SWITCH_INTERVAL_S = 0.0005


def share_interpreter() -> None:
    """Let threads that move bytes have the interpreter lock sooner; for the start of a process that moves many.

    A thread that comes back from a copy or a system call waits until the event loop's thread gives the lock away, by
    default up to 5 ms: ten times as long as the copy of a chunk takes.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def failed(outcome: ReadOutcome, detail: str, started_ns: int | None = None) -> SliceResult:
    """A result without bytes."""
    now_ns = time.time_ns()
    return SliceResult(outcome, now_ns if started_ns is None else started_ns, now_ns, detail)


def all_failed(slices: Sequence[SliceRead], outcome: ReadOutcome, detail: str) -> list[SliceResult]:
    return [failed(outcome, detail) for _ in slices]


def shares(slices: Sequence[SliceRead], max_shares: int, min_bytes: int) -> list[Sequence[SliceRead]]:
    """Cut a batch, in order, into at most `max_shares` parts of about equal size, none much below `min_bytes`."""
    total = sum(len(each.destination) for each in slices)
    num_shares = max(1, min(max_shares, total // min_bytes, len(slices)))
    if num_shares == 1:
        return [slices]
    parts: list[Sequence[SliceRead]] = []
    start = done = 0
    for end, each in enumerate(slices, 1):
        done += len(each.destination)
        if done * num_shares >= total * (len(parts) + 1):
            parts.append(slices[start:end])
            start = end
    return parts if start == len(slices) else [*parts, slices[start:]]


def copy(destination: memoryview, source: memoryview) -> None:
    """One copy without the interpreter lock (assigning memoryviews would hold it for the whole copy)."""
    np.copyto(np.frombuffer(destination, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def seconds_left(deadline_ns: int) -> float:
    """Until a Unix time; negative when it has passed."""
    return (deadline_ns - time.time_ns()) / 1e9


async def all_of(works: Sequence[asyncio.Future[list[SliceResult]]]) -> list[list[SliceResult]]:
    """The results of threads. A cancellation comes through at once, and reaches none of them: see `ended`."""
    await asyncio.shield(asyncio.gather(*works))
    return [work.result() for work in works]


async def ended(*works: asyncio.Future[T]) -> None:
    """Wait until threads' work is over, whatever cancels us meanwhile; then let the cancellation through.

    Used after the threads were told to stop: the destinations are the caller's again only when they have.
    """
    cancelled: asyncio.CancelledError | None = None
    while open_ones := [work for work in works if not work.done()]:
        try:
            await asyncio.wait(open_ones)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
