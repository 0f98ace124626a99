"""These tests need an RDMA device: `make test-rdma` runs them in a virtual machine that has one.

Elsewhere they are skipped, with the reason; where HALFMOON_TESTS_NEED_RDMA is set, a missing device is a failure.
"""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from halfmoon.pool.arena import Arena
from halfmoon.transport.rdma.node import RdmaNode
from halfmoon.transport.rdma.reader import RdmaTransport
from support.rdma_peer import NODE, SECRET, DirectControl, RdmaPeer, no_device, own_arena


@pytest.fixture(autouse=True, scope="session")
def device() -> None:
    if (reason := no_device()) is not None:
        if os.environ.get("HALFMOON_TESTS_NEED_RDMA"):
            pytest.fail(f"there is no RDMA device here: {reason}", pytrace=False)
        pytest.skip(f"no RDMA device ({reason}); `make test-rdma` brings one")


@pytest.fixture
def arena(tmp_path: Path, device: None) -> Arena:
    """The reader's own, registered whole."""
    return own_arena(tmp_path)


@pytest.fixture
async def devices(arena: Arena) -> AsyncIterator[RdmaNode]:
    made = RdmaNode.open(arena)
    yield made
    made.close()
    arena.close()


@pytest.fixture(params=[True, False], ids=["windows", "one-key"])
async def peer(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RdmaPeer]:
    """One that opens each slot to its reader alone, and one whose reader has a key to them all."""
    async with RdmaPeer(tmp_path, windows=request.param).serving() as made:
        assert made.devices.windows == request.param
        yield made


@pytest.fixture
async def control(peer: RdmaPeer) -> DirectControl:
    return DirectControl({NODE: peer.server})


@pytest.fixture
async def transport(devices: RdmaNode, control: DirectControl) -> AsyncIterator[RdmaTransport]:
    made = RdmaTransport(devices, control, reader="reader", secret=SECRET)
    yield made
    await made.close()
