"""Waiting in tests: for a condition, with a deadline; never for a time."""

import asyncio
import time
from collections.abc import Awaitable, Callable

_POLL_S = 0.005


async def until(predicate: Callable[[], object], timeout_s: float = 10.0, *, what: str = "") -> None:
    """Return once `predicate()` is true; fail the test where that takes longer than `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what or getattr(predicate, '__name__', predicate)}")
        await asyncio.sleep(_POLL_S)


async def until_awaited(predicate: Callable[[], Awaitable[object]], timeout_s: float = 10.0, *, what: str = "") -> None:
    """The same for a predicate that must ask somebody."""
    deadline = time.monotonic() + timeout_s
    while not await predicate():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what or predicate}")
        await asyncio.sleep(_POLL_S)


def until_blocking(predicate: Callable[[], object], timeout_s: float = 10.0, *, what: str = "") -> None:
    """The same without an event loop."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what or getattr(predicate, '__name__', predicate)}")
        time.sleep(_POLL_S)
