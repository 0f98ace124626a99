"""Reads between two arenas of this process, over a real device."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from halfmoon.pool.arena import Arena
from halfmoon.transport.protocol import ReadOutcome, SliceRead
from halfmoon.transport.rdma.node import RdmaNode
from halfmoon.transport.rdma.reader import RdmaTransport
from support.pool_peer import GENERATION, GOOD_LEASE, NODE, NUM_SLOTS, payload
from support.rdma_peer import SECRET, DirectControl, RdmaPeer


def in_seconds(seconds: float) -> int:
    return time.time_ns() + int(seconds * 1e9)


@pytest.fixture(params=[True, False], ids=["windows", "one-key"])
async def peer(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RdmaPeer]:
    async with RdmaPeer(tmp_path, windows=request.param).serving() as made:
        assert made.devices.windows == request.param
        yield made


@pytest.fixture
async def control(peer: RdmaPeer) -> DirectControl:
    return DirectControl({NODE: peer.server})


@pytest.fixture
async def transport(own_devices: RdmaNode, control: DirectControl) -> AsyncIterator[RdmaTransport]:
    made = RdmaTransport(own_devices, control, reader="reader", secret=SECRET)
    yield made
    await made.close()


async def test_bytes_arrive_in_the_readers_arena(peer: RdmaPeer, transport: RdmaTransport, own_arena: Arena) -> None:
    reads = [SliceRead(slot, GENERATION, 0, own_arena.slot(NUM_SLOTS - 1 - slot)) for slot in range(NUM_SLOTS)]
    results = await transport.read(peer.info, GOOD_LEASE, reads, deadline_ns=in_seconds(20))
    assert [(result.outcome, result.detail) for result in results] == [(ReadOutcome.OK, "")] * NUM_SLOTS
    for slot, read in enumerate(reads):
        assert bytes(read.destination) == payload(slot)
