"""Kv-tiers with an SSD below their DRAM."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from halfmoon.bus.memory import MemoryBroker
from support.pool_nodes import Node
from support.ssd_nodes import StartNode, ssd_nodes


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def start(broker: MemoryBroker, tmp_path: Path) -> AsyncIterator[StartNode]:
    async with ssd_nodes(broker, tmp_path) as start_one:
        yield start_one


@pytest.fixture
async def node(start: StartNode) -> AsyncIterator[Node]:
    async with start() as running:
        yield running
