"""Buses of each kind, on one broker per test, closed when the test is over."""

from collections.abc import Awaitable, Callable

from halfmoon.bus.protocol import Bus

BusMaker = Callable[[], Awaitable[Bus]]
"""Connects one more client to the test's broker."""
