"""These tests need an RDMA device: `make test-rdma` runs them in a virtual machine that has one.

Elsewhere they are skipped, with the reason; where HALFMOON_TESTS_NEED_RDMA is set, a missing device is a failure.
"""

import functools
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from halfmoon.pool.arena import Arena, arena_path
from halfmoon.schemas.ids import NodeId
from halfmoon.transport.rdma.device import open_devices
from halfmoon.transport.rdma.node import RdmaNode
from halfmoon.transport.rdma.verbs import RdmaUnavailable, load_verbs
from support.pool_peer import NUM_SLOTS, SLOT_BYTES


@functools.cache
def missing() -> str | None:
    """Why there is no device; None where there is one."""
    try:
        for device in open_devices(load_verbs(), (), None):
            device.close()
    except RdmaUnavailable as error:
        return str(error)
    return None


@pytest.fixture(autouse=True, scope="session")
def device() -> None:
    if (reason := missing()) is not None:
        if os.environ.get("HALFMOON_TESTS_NEED_RDMA"):
            pytest.fail(f"there is no RDMA device here: {reason}", pytrace=False)
        pytest.skip(f"no RDMA device ({reason}); `make test-rdma` brings one")


@pytest.fixture
def own_arena(tmp_path: Path, device: None) -> Arena:
    """The reader's own, registered whole."""
    return Arena.create(arena_path(tmp_path, NodeId("reader"), 1), SLOT_BYTES, NUM_SLOTS)


@pytest.fixture
async def own_devices(own_arena: Arena) -> AsyncIterator[RdmaNode]:
    devices = RdmaNode.open(own_arena)
    yield devices
    devices.close()
    own_arena.close()
