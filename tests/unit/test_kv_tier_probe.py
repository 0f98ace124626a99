"""The verb `probe`: what a node says of itself, and what it measures of its peers."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from halfmoon.bus.endpoint import call
from halfmoon.bus.memory import MemoryBroker
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import NodeId
from halfmoon.schemas.probes import Probe, Probed, ProbedPath
from support.pool_nodes import SLOT_BYTES, Node, running_node

NUM_BYTES = 64 * SLOT_BYTES


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def nodes(broker: MemoryBroker, tmp_path: Path) -> AsyncIterator[tuple[Node, Node]]:
    async with (
        running_node(broker, tmp_path, "node-a") as first,
        running_node(broker, tmp_path, "node-b", host="host-2") as second,
    ):
        yield first, second


async def probe(node: Node, peer: str | None, num_bytes: int = NUM_BYTES, time_limit_s: float = 1.0) -> Probed:
    request = Probe(peer=None if peer is None else NodeId(peer), num_bytes=num_bytes, time_limit_s=time_limit_s)
    return await call(node.bus, f"{subjects.kv_tier(node.service.node)}.probe", request, Probed, timeout_s=20)


def by_name(found: Probed) -> dict[str, ProbedPath]:
    return {path.transport: path for path in found.paths}


def is_back(*nodes: Node) -> bool:
    for node in nodes:
        node.service.store.ledger.check_integrity()
        assert len(node.service.store.ledger.leases) == 0
        assert node.service.store.ledger.slots.counts().free == 8
    return True


async def test_a_node_tells_its_clock_and_its_room(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    before_ns = time.time_ns()
    found = await probe(nodes[0], None)
    assert before_ns <= found.now_ns <= time.time_ns()
    assert (found.node, found.host, found.memory_dir) == ("node-a", "host-1", str(tmp_path))
    assert 0 < found.memory_free_bytes <= found.memory_total_bytes
    assert (found.peer, found.paths, found.chosen, found.detail) == (None, (), None, "")


async def test_each_transport_is_measured_and_the_best_chosen(nodes: tuple[Node, Node]) -> None:
    first, second = nodes
    found = await probe(first, "node-b")
    paths = by_name(found)
    assert found.chosen == "tcp"
    assert not paths["shm"].is_usable
    assert "host-2" in paths["shm"].reason
    assert paths["tcp"].is_usable
    assert 0 < paths["tcp"].num_bytes <= NUM_BYTES
    assert (paths["tcp"].gb_per_s or 0) > 0
    assert paths["tcp"].slice_bytes == SLOT_BYTES
    assert is_back(first, second)


async def test_on_one_host_shared_memory_is_chosen(broker: MemoryBroker, tmp_path: Path) -> None:
    async with running_node(broker, tmp_path, "node-a") as first, running_node(broker, tmp_path, "node-b") as second:
        found = await probe(first, "node-b")
        assert found.chosen == "shm"
        assert {name for name, path in by_name(found).items() if path.gb_per_s} == {"shm", "tcp"}
        assert is_back(first, second)


async def test_without_bytes_nothing_is_read(nodes: tuple[Node, Node]) -> None:
    found = await probe(nodes[0], "node-b", num_bytes=0)
    assert (found.chosen, by_name(found)["tcp"].is_usable, by_name(found)["tcp"].gb_per_s) == ("tcp", True, None)
    assert nodes[1].service.store.stats(0).num_leases == 0


async def test_bytes_and_time_are_bounded(nodes: tuple[Node, Node]) -> None:
    before_s = time.monotonic()
    found = await probe(nodes[0], "node-b", num_bytes=1 << 60, time_limit_s=0.2)
    assert time.monotonic() - before_s < 5
    assert 0 < by_name(found)["tcp"].num_bytes <= 1 << 30


async def test_a_path_that_fails_says_why_and_is_not_chosen(broker: MemoryBroker, tmp_path: Path) -> None:
    other = {"cluster_secret": "sun"}
    async with (
        running_node(broker, tmp_path, "node-a") as first,
        running_node(broker, tmp_path, "node-b", host="host-2", settings=other) as second,
    ):
        found = await probe(first, "node-b")
        assert found.chosen is None
        assert not by_name(found)["tcp"].is_usable
        assert "secret" in by_name(found)["tcp"].reason
        assert is_back(first, second)


async def test_an_unknown_peer_is_said_to_be_silent(nodes: tuple[Node, Node]) -> None:
    found = await probe(nodes[0], "node-x")
    assert (found.chosen, found.paths) == (None, ())
    assert "node-x" in found.detail


async def test_where_every_slot_is_in_use_the_choice_is_told_without_figures(nodes: tuple[Node, Node]) -> None:
    first, second = nodes
    held = await second.write(*(f"chunk-{number}" for number in range(8)))
    found = await probe(first, "node-b")
    assert (found.chosen, by_name(found)["tcp"].gb_per_s) == ("tcp", None)
    assert "every slot of node node-b is in use" in found.detail
    await second.client.release(held)
    assert second.service.store.stats(0).ready == 8
