"""A leader that is stopped just as it is deposed does stop."""

import asyncio

import pytest

from halfmoon.registry.leader import _until_one_ends
from halfmoon.registry.term import Deposed


@pytest.mark.parametrize("num_steps", range(4))
async def test_a_cancellation_at_the_moment_of_a_failure_is_not_lost(num_steps: int) -> None:
    fails = asyncio.Event()
    ended: list[str] = []

    async def failing() -> None:
        await fails.wait()
        raise Deposed

    async def other() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("other")

    async def lead() -> None:
        try:
            await _until_one_ends(failing(), other())
        except Deposed:
            ended.append("deposed")
        await asyncio.Event().wait()

    task = asyncio.create_task(lead())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    fails.set()
    for _ in range(num_steps):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5.0)
    assert "other" in ended
