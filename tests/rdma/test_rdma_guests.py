"""Between two machines, over a wire: `make test-rdma` boots two guests, and names the other one's address."""

import asyncio
import os
import time
from collections.abc import AsyncIterator

import pytest

from halfmoon.bus.endpoint import call
from halfmoon.bus.errors import BusError
from halfmoon.bus.nats import NatsBus
from halfmoon.kv_tier.rdma import BusControl
from halfmoon.pool.arena import Arena
from halfmoon.schemas import subjects
from halfmoon.schemas.kv_tier import Describe, NodeInfo
from halfmoon.transport.protocol import ReadOutcome, SliceRead
from halfmoon.transport.rdma.node import RdmaNode
from halfmoon.transport.rdma.reader import RdmaTransport
from support.rdma_guest import connect
from support.rdma_peer import GENERATION, GOOD_LEASE, NODE, NUM_SLOTS, SECRET, payload

OTHER = os.environ.get("RDMA_TESTS_OTHER_MACHINE", "")
pytestmark = [
    pytest.mark.skipif(not OTHER, reason="there is no second machine; RDMA_TESTS_OTHER_MACHINE names none"),
    pytest.mark.timeout(300),
]

START_S = 200.0
"""Until the other machine has started."""


@pytest.fixture
async def bus() -> AsyncIterator[NatsBus]:
    made = await connect(OTHER, START_S)
    yield made
    await made.close()


async def described(bus: NatsBus) -> NodeInfo:
    async with asyncio.timeout(START_S):
        while True:
            try:
                return await call(bus, f"{subjects.kv_tier(NODE)}.describe", Describe(), NodeInfo, timeout_s=5)
            except BusError:
                continue


async def test_bytes_cross_from_machine_to_machine(bus: NatsBus, devices: RdmaNode, arena: Arena) -> None:
    peer = await described(bus)
    assert peer.rdma is not None
    assert [port.gid for port in peer.rdma.ports] != [nic.device.port.gid for nic in devices.nics]
    transport = RdmaTransport(devices, BusControl(bus), reader="reader", secret=SECRET)
    reads = [SliceRead(slot, GENERATION, 0, arena.slot(slot)) for slot in range(NUM_SLOTS)]
    for _ in range(3):
        for read in reads:
            read.destination[:] = bytes(len(read.destination))
        results = await transport.read(peer, GOOD_LEASE, reads, deadline_ns=time.time_ns() + 60_000_000_000)
        assert [(result.outcome, result.detail) for result in results] == [(ReadOutcome.OK, "")] * NUM_SLOTS
        assert all(read.destination == payload(read.slot) for read in reads)
    await transport.close()
