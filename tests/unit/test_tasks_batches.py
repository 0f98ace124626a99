"""What comes while nobody looks, taken all at once: in order, errors last, the source closed."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from halfmoon.tasks import batches


class Source:
    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.num_given = 0
        self.closed = asyncio.Event()
        self.begun = asyncio.Event()

    async def items(self, first: int, more: int, error: Exception | None = None) -> AsyncGenerator[int]:
        """The first at once; more when the gate is open."""
        try:
            for item in range(first + more):
                if item == first:
                    await self.gate.wait()
                self.num_given += 1
                self.begun.set()
                yield item
            if error is not None:
                raise error
        finally:
            self.closed.set()


async def test_the_source_goes_on_while_its_consumer_is_busy() -> None:
    source = Source()
    found = []
    async with aclosing(batches(source.items(1, 5))) as come:
        async for batch in come:
            found.append(batch)
            source.gate.set()
            await source.closed.wait()
    assert found == [[0], [1, 2, 3, 4, 5]]


async def test_an_error_is_raised_after_the_items_before_it() -> None:
    source, error = Source(), ValueError("broken")
    found: list[int] = []

    async def consume() -> None:
        async with aclosing(batches(source.items(3, 0, error))) as come:
            async for batch in come:
                found.extend(batch)

    with pytest.raises(ValueError, match="broken") as raised:
        await consume()
    assert raised.value is error
    assert found == [0, 1, 2]


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_consumer_that_goes_leaves_the_source_closed(is_cancelled: bool) -> None:
    source = Source()

    async def consume() -> None:
        async with aclosing(batches(source.items(1, 5))) as come:
            async for _ in come:
                if not is_cancelled:
                    return

    task = asyncio.create_task(consume())
    await source.begun.wait()
    if is_cancelled:
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        await task
    assert source.closed.is_set()
    assert source.num_given == 1


async def test_nothing_comes_of_nothing() -> None:
    async with aclosing(batches(Source().items(0, 0))) as come:
        assert [batch async for batch in come] == []
