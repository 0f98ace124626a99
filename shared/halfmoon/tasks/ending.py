"""Ending tasks for good."""

import asyncio
from typing import Any

_AGAIN_S = 0.5


async def ended(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel the tasks, and wait until they are over, whatever comes of them.

    They are cancelled again while they go on: before Python 3.12, `asyncio.wait_for` loses a cancellation that comes
    together with its result, and nats-py waits for every answer with it.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)
