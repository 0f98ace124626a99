"""A network that can be cut: a tcp proxy that stops forwarding, or drops its connections, after so many bytes."""

import asyncio
from typing import Self

_BLOCK_BYTES = 4096


class Proxy:
    """Listens on `host:port` and forwards to `target:port`. As `async with`."""

    def __init__(self, host: str, target: str, port: int) -> None:
        self._host = host
        self._target = target
        self._port = port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._left: int | None = None
        self._drops = False
        self._is_whole = asyncio.Event()
        self._is_whole.set()
        self.num_bytes = 0
        """Towards the client, all in all."""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shut()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, self._host, self._port)

    async def shut(self) -> None:
        """End all connections, and refuse new ones until `open`."""
        assert self._server is not None
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    def cut_after(self, num_bytes: int, *, drop: bool) -> None:
        """Forward so many bytes more to clients. Then hang, like a cable that is pulled; or drop the connection."""
        self._left = num_bytes
        self._drops = drop

    def mend(self) -> None:
        """Forward everything again, also what waited."""
        self._left = None
        self._is_whole.set()

    @property
    def is_cut(self) -> bool:
        return self._left == 0

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self._target, self._port)
        except OSError:
            writer.close()
            return
        ways = [asyncio.create_task(self._up(reader, far_writer)), asyncio.create_task(self._down(far_reader, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            for each in (writer, far_writer):
                each.transport.abort()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while block := await reader.read(_BLOCK_BYTES):
            await self._pass()
            writer.write(block)
            await writer.drain()

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while block := await reader.read(_BLOCK_BYTES):
            while block:
                await self._pass()
                some = block if self._left is None else block[: self._left]
                block = block[len(some) :]
                if self._left is not None:
                    self._left -= len(some)
                self.num_bytes += len(some)
                writer.write(some)
                await writer.drain()

    async def _pass(self) -> None:
        """Return when bytes may go on. Raises ConnectionError where the connection is to be dropped."""
        if self._left == 0:
            if self._drops:
                raise ConnectionError("cut")
            self._is_whole.clear()
            await self._is_whole.wait()
