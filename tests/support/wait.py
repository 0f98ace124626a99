"""Waiting in tests: for a condition, with a deadline; never for a time."""

import asyncio
import time
from collections.abc import Callable

_POLL_S = 0.005


async def until(predicate: Callable[[], object], timeout_s: float = 10.0, *, what: str = "") -> None:
    """Return once `predicate()` is true; fail the test where that takes longer than `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what or getattr(predicate, '__name__', predicate)}")
        await asyncio.sleep(_POLL_S)


def until_blocking(predicate: Callable[[], object], timeout_s: float = 10.0, *, what: str = "") -> None:
    """The same without an event loop."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what or getattr(predicate, '__name__', predicate)}")
        time.sleep(_POLL_S)
