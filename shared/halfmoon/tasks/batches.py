"""What comes while nobody looks, taken all at once."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from halfmoon.tasks.ending import ended

T = TypeVar("T")


async def batches(source: AsyncGenerator[T]) -> AsyncGenerator[list[T]]:
    """The items of `source`, in order: all that have come since the last look, as soon as there is one.

    `source` is read by a task of its own, so it goes on while its consumer is busy; it is the caller's to bound. What
    it raises is raised after the items before it. To be iterated under `aclosing`; `source` is closed with it.
    """
    come: list[T] = []
    news = asyncio.Event()

    async def read() -> None:
        async with aclosing(source) as items:
            async for item in items:
                come.append(item)
                news.set()

    reader = asyncio.create_task(read())
    reader.add_done_callback(lambda _: news.set())
    try:
        while come or not reader.done():
            if come:
                batch, come = come, []
                yield batch
            else:
                news.clear()
                await news.wait()
        reader.result()
    finally:
        await ended(reader)
