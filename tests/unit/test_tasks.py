"""A task that loses a cancellation is ended all the same."""

import asyncio

from halfmoon.tasks import ended


async def test_a_cancellation_that_is_lost_is_made_again() -> None:
    num_lost = 0

    async def loses_two() -> None:
        nonlocal num_lost
        while num_lost < 2:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                num_lost += 1
        await asyncio.Event().wait()

    async def fails() -> None:
        raise ValueError

    task, failed = asyncio.create_task(loses_two()), asyncio.create_task(fails())
    await asyncio.sleep(0)
    await ended(task, failed)
    assert num_lost == 2
    assert task.cancelled()
    assert failed.done()
    await ended()
