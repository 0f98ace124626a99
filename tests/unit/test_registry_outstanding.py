"""Calls outlive their callers' patience, are counted, and have an end."""

import asyncio

import pytest

from halfmoon.registry.outstanding import Outstanding
from support.wait import until


class Gate:
    """A call that waits until it is let through."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.num_done = 0
        self.num_cancelled = 0

    async def pass_through(self) -> str:
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        self.num_done += 1
        return "through"


async def test_a_call_goes_on_after_its_caller_gave_up_or_was_cancelled() -> None:
    calls, gate = Outstanding(8), Gate()
    with pytest.raises(TimeoutError):
        await calls.wait(gate.pass_through(), 0.01)
    caller = asyncio.create_task(calls.wait(gate.pass_through(), 60.0))
    await until(lambda: len(calls) == 2)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert len(calls) == 2
    gate.open.set()
    assert await calls.wait(gate.pass_through(), 5.0) == "through"
    await until(lambda: len(calls) == 0)
    assert (gate.num_done, gate.num_cancelled) == (3, 0)


async def test_too_many_unanswered_are_refused_at_once_until_one_is_answered() -> None:
    calls, gate = Outstanding(2), Gate()
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await calls.wait(gate.pass_through(), 0.001)
    with pytest.raises(TimeoutError, match="2 earlier questions are unanswered"):
        await calls.wait(gate.pass_through(), 60.0)
    gate.open.set()
    await until(lambda: len(calls) == 0)
    assert await calls.wait(gate.pass_through(), 5.0) == "through"


async def test_a_failure_reaches_who_waits_and_troubles_nobody_where_none_does() -> None:
    calls, gate = Outstanding(2), Gate()

    async def fail() -> None:
        await gate.open.wait()
        raise ValueError("no")

    with pytest.raises(TimeoutError):
        await calls.wait(fail(), 0.001)
    gate.open.set()
    with pytest.raises(ValueError, match="no"):
        await calls.wait(fail(), 5.0)
    await until(lambda: len(calls) == 0)


async def test_closing_waits_a_while_and_then_leaves_nothing_behind() -> None:
    calls, quick, never = Outstanding(4), Gate(), Gate()
    for gate in (quick, never):
        with pytest.raises(TimeoutError):
            await calls.wait(gate.pass_through(), 0.001)
    closing = asyncio.create_task(calls.close(0.2))
    quick.open.set()
    await closing
    assert (quick.num_done, never.num_cancelled, len(calls)) == (1, 1, 0)
    await calls.close(0.2)
