"""A client that leaves, at each place where a stream can wait: what was opened is closed."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message, Scope

from halfmoon.gateway.connection import ClientLeft, while_connected
from halfmoon.gateway.sse import EventStream
from support.wait import until

SCOPE: Scope = {"type": "http"}


class Connection:
    """An ASGI connection that stays, and takes what is sent, until told otherwise."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.stalled = False
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if self.stalled:
            await asyncio.Event().wait()


class Closing:
    def __init__(self) -> None:
        self.count = 0

    async def __call__(self) -> None:
        self.count += 1


async def _frames(hang_after: int | None) -> AsyncGenerator[bytes, None]:
    for number in range(3):
        if number == hang_after:
            await asyncio.Event().wait()
        yield b"%d" % number


async def test_all_is_sent_and_closed() -> None:
    connection, close = Connection(), Closing()
    await EventStream(_frames(None), {"x-request-id": "r"}, close)(SCOPE, connection.receive, connection.send)
    start, *bodies = connection.sent
    assert (b"x-request-id", b"r") in start["headers"]
    assert (b"content-type", b"text/event-stream; charset=utf-8") in start["headers"]
    assert [(message["body"], message["more_body"]) for message in bodies] == [
        (b"0", True),
        (b"1", True),
        (b"2", True),
        (b"", False),
    ]
    assert close.count == 1


@pytest.mark.parametrize("hang_after", [0, 1])
async def test_the_client_leaves_while_nothing_comes(hang_after: int) -> None:
    connection, close = Connection(), Closing()
    response = EventStream(_frames(hang_after), {}, close)
    running = asyncio.create_task(response(SCOPE, connection.receive, connection.send))
    await until(lambda: len(connection.sent) == 1 + hang_after)
    connection.left.set()
    await asyncio.wait_for(running, 5)
    assert close.count == 1


async def test_the_client_leaves_while_it_does_not_read() -> None:
    connection, close = Connection(), Closing()
    connection.stalled = True
    running = asyncio.create_task(EventStream(_frames(None), {}, close)(SCOPE, connection.receive, connection.send))
    await until(lambda: connection.sent)
    connection.left.set()
    await asyncio.wait_for(running, 5)
    assert close.count == 1


async def test_the_server_stops_before_anything_was_sent() -> None:
    connection, close = Connection(), Closing()
    running = asyncio.create_task(EventStream(_frames(None), {}, close)(SCOPE, connection.receive, connection.send))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert close.count == 1


async def test_work_that_ends_or_fails_is_passed_on() -> None:
    connection = Connection()

    async def fine() -> int:
        return 5

    async def broken() -> int:
        raise ValueError("why")

    assert await while_connected(connection.receive, fine()) == 5
    with pytest.raises(ValueError, match="why"):
        await while_connected(connection.receive, broken())


async def test_work_has_ended_when_the_client_is_said_to_have_left() -> None:
    connection = Connection()
    ended = False

    async def work() -> None:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.02)
            ended = True

    connection.left.set()
    with pytest.raises(ClientLeft):
        await while_connected(connection.receive, work())
    assert ended
