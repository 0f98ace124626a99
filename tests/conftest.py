"""Fixtures that many tests share: real servers in the test's own folder, and buses on them."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from halfmoon.bus.memory import MemoryBroker, MemoryBus
from halfmoon.bus.nats import NatsBus, NatsSettings
from halfmoon.bus.protocol import Bus
from support.buses import BusMaker
from support.nats import NatsServer


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A running nats-server with JetStream."""
    with running_server(tmp_path) as server:
        yield server


@pytest.fixture
async def nats_buses(nats_server: NatsServer) -> AsyncIterator[BusMaker]:
    """Makes buses on `nats_server`."""

    async def connect() -> Bus:
        return await NatsBus.connect(NatsSettings(url=nats_server.url))

    async with closing_buses(connect) as make:
        yield make


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.nats)])
async def bus_maker(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[BusMaker]:
    """Makes buses on one broker, in memory and over NATS: the same test for both."""
    if request.param == "memory":
        broker = MemoryBroker()

        async def attach() -> Bus:
            return MemoryBus(broker)

        async with closing_buses(attach) as make:
            yield make
        return
    with running_server(tmp_path) as server:

        async def connect() -> Bus:
            return await NatsBus.connect(NatsSettings(url=server.url))

        async with closing_buses(connect) as make:
            yield make


@contextmanager
def running_server(folder: Path) -> Iterator[NatsServer]:
    server = NatsServer(folder / "nats")
    server.start()
    try:
        yield server
    finally:
        server.stop()


@asynccontextmanager
async def closing_buses(connect: BusMaker) -> AsyncIterator[BusMaker]:
    """`connect`, whose buses are closed at the end."""
    made: list[Bus] = []

    async def make() -> Bus:
        made.append(await connect())
        return made[-1]

    yield make
    await asyncio.gather(*(bus.close() for bus in made))
