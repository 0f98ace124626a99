"""From a plan to its events: several submissions, one stream."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from halfmoon.client import GenerateClient
from halfmoon.gateway.policy import Plan
from halfmoon.schemas.requests import TokenEvent, Tokens
from halfmoon.tracing import Context

_QUEUED_PER_STREAM = 16


async def run_plan(
    client: GenerateClient, plan: Plan, *, deadline_ns: int, context: Context
) -> AsyncGenerator[tuple[int, TokenEvent], None]:
    """Each choice's events, with its index; each ends with its own terminal event.

    Closing the iterator, or cancelling its reader, cancels what hasn't ended.
    """
    streams = [client.submit(request, deadline_ns=deadline_ns, context=context) for request in plan.submissions]
    if len(streams) == 1:
        async with aclosing(streams[0]) as events:
            async for event in events:
                yield 0, event
        return
    async with aclosing(_merged(streams)) as merged:
        async for item in merged:
            yield item


async def _merged(
    streams: Sequence[AsyncGenerator[TokenEvent, None]],
) -> AsyncGenerator[tuple[int, TokenEvent], None]:
    queue: asyncio.Queue[tuple[int, TokenEvent | Exception]] = asyncio.Queue(len(streams) * _QUEUED_PER_STREAM)

    async def pump(index: int, stream: AsyncGenerator[TokenEvent, None]) -> None:
        try:
            async with aclosing(stream):
                async for event in stream:
                    await queue.put((index, event))
        except Exception as error:
            await queue.put((index, error))

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_running = len(streams)
        while num_running:
            index, event = await queue.get()
            if isinstance(event, Exception):
                raise event
            num_running -= not isinstance(event, Tokens)
            yield index, event
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
