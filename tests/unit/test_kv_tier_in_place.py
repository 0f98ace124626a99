"""Two nodes of one host: what decode reads stays where it is, leased there for as long as it is read here."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from halfmoon.bus.endpoint import call
from halfmoon.bus.memory import MemoryBroker
from halfmoon.chunks.plan import PlannedChunk
from halfmoon.memory import Place, place_of
from halfmoon.pool import PoolClient
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkOutcome
from halfmoon.schemas.ids import NodeId, WorkerId
from halfmoon.schemas.kv_tier import Acquire, Acquired, AcquiredChunk
from halfmoon.schemas.wire import Message
from halfmoon.tracing import attributes, names
from halfmoon.worker.reading import read_chunk
from support.pool_nodes import CHUNK_BYTES, REQUEST, SLOT_BYTES, Node, content_of, key_of, running_node, slots_of
from support.wait import until

HIT_REMOTE = ChunkOutcome.HIT_REMOTE


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@asynccontextmanager
async def two_nodes(broker: MemoryBroker, folder: Path, **settings: object) -> AsyncIterator[tuple[Node, Node]]:
    """The chunks' node, and the readers'."""
    async with (
        running_node(broker, folder, "node-a") as first,
        running_node(broker, folder, "node-b", settings=settings) as second,
    ):
        yield first, second


@pytest.fixture
async def pair(broker: MemoryBroker, tmp_path: Path) -> AsyncIterator[tuple[Node, Node]]:
    async with two_nodes(broker, tmp_path) as nodes:
        yield nodes


def num_leases(node: Node) -> int:
    node.service.store.expire()
    return len(node.service.store.ledger.leases)


async def written(node: Node, *chunks: str) -> None:
    await node.client.release(await node.write(*chunks))


async def acquire(node: Node, source: Node, *chunks: str, lease_s: float = 10.0) -> Acquired:
    wanted = node.wanted(*chunks, sources=[source.source])
    return await node.client.acquire(REQUEST, wanted, keep=False, lease_s=lease_s)


def planned(name: str) -> PlannedChunk:
    return PlannedChunk(index=0, num_tokens=4, num_bytes=CHUNK_BYTES, key=key_of(name), parent=None, shared=True)


async def test_a_reader_gets_the_sources_own_slots_and_no_byte_moves(pair: tuple[Node, Node]) -> None:
    first, second = pair
    await written(first, "a", "b")
    acquired = await acquire(second, first, "a", "b")
    for name, chunk in zip("ab", acquired.chunks, strict=True):
        assert chunk.slot is not None
        assert chunk.slot.arena is not None
        assert (chunk.outcome, chunk.source, chunk.transport) == (HIT_REMOTE, NodeId("node-a"), "shm")
        assert (chunk.num_bytes_moved, chunk.slot.arena.node) == (0, NodeId("node-a"))
        assert bytes(second.client.payload(chunk.slot)) == content_of(name)
        assert second.client.holds(chunk.slot)
        place = place_of(second.client.payload(chunk.slot))
        assert place == Place(first.client.arena.path, chunk.slot.slot * SLOT_BYTES, CHUNK_BYTES)
    assert slots_of(second) == (8, 0, 0, 0)
    assert slots_of(first) == (6, 0, 0, 2)
    stats = await second.client.stats()
    assert (stats.bytes_pulled, stats.bytes_in_place, stats.hits_remote) == (0, 2 * CHUNK_BYTES, 2)
    assert (
        f"halfmoon_kvtier_in_place_bytes_total {float(2 * CHUNK_BYTES)}"
        in generate_latest(second.metrics.registry).decode()
    )
    await second.client.release(acquired.lease_id)
    await until(lambda: num_leases(first) == 0)
    assert slots_of(first) == (6, 0, 2, 0)

    def facts() -> list[dict[str, object]]:
        spans = [span for span in second.spans.get_finished_spans() if span.name == names.KVTIER_TRANSFER]
        return [dict(span.attributes or {}) for span in spans]

    await until(lambda: len(facts()) == 2, what="both are told")
    assert [each[attributes.CHUNK_IN_PLACE] for each in facts()] == [True, True]
    assert [each[attributes.CHUNK_TRANSPORT] for each in facts()] == ["shm", "shm"]


async def test_a_handed_over_partial_chunk_is_freed_when_both_have_let_go(pair: tuple[Node, Node]) -> None:
    first, second = pair
    writer = await first.write("partial", register=False)
    acquired = await acquire(second, first, "partial")
    await first.client.release(writer)
    assert slots_of(first) == (7, 0, 0, 1)
    slot = acquired.chunks[0].slot
    assert slot is not None
    assert bytes(second.client.payload(slot)) == content_of("partial")
    await second.client.release(acquired.lease_id)
    await until(lambda: slots_of(first) == (8, 0, 0, 0))
    assert not second.client.holds(slot)


async def test_the_lease_at_the_source_is_renewed_while_the_reader_reads(pair: tuple[Node, Node]) -> None:
    first, second = pair
    await written(first, "a")
    acquired = await acquire(second, first, "a", lease_s=0.6)
    [lease] = first.service.store.ledger.leases._leases.values()
    first_expiry_ns = lease.expires_ns = first.service.store.clock_ns() + 600_000_000
    await until(lambda: lease.expires_ns > first_expiry_ns + 1_000_000_000, what="renewed more than once")
    assert second.client.is_open(acquired.lease_id)
    await second.client.release(acquired.lease_id)
    await until(lambda: num_leases(first) == 0)


async def test_a_reader_that_dies_lets_go_at_the_source_with_its_lease(
    pair: tuple[Node, Node], broker: MemoryBroker
) -> None:
    first, second = pair
    await written(first, "a")
    wanted = tuple(second.wanted("a", sources=[first.source]))
    request = Acquire(request_id=REQUEST, holder=WorkerId("w"), chunks=wanted, lease_s=0.2, keep=False, in_place=True)
    subject = f"{subjects.kv_tier(NodeId('node-b'))}.acquire"
    acquired = await call(second.bus, subject, request, Acquired, timeout_s=5)  # and nobody renews it
    assert acquired.chunks[0].outcome is HIT_REMOTE
    assert slots_of(first) == (7, 0, 0, 1)
    await until(lambda: slots_of(first) == (7, 0, 1, 0))
    assert num_leases(first) == 0


async def test_a_slot_that_was_freed_under_its_reader_is_a_typed_miss(pair: tuple[Node, Node]) -> None:
    first, second = pair
    writer = await first.write("a", register=False)
    acquired = await acquire(second, first, "a")
    found = acquired.chunks[0]
    reading = await read_chunk(second.client, planned("a"), found)
    assert reading.payload is not None
    assert reading.after_use(second.client).payload is not None
    await first.client.release(writer)
    for lease_id in list(first.service.store.ledger.leases._leases):
        first.service.store.ledger.release(lease_id, first.service.store.clock_ns())
    await first.write("other")
    late = reading.after_use(second.client)
    assert (late.outcome, late.payload) == (ChunkOutcome.EXPIRED, None)


async def test_damage_is_reported_where_the_slot_lies(pair: tuple[Node, Node]) -> None:
    first, second = pair
    await written(first, "a")
    acquired = await acquire(second, first, "a")
    found = acquired.chunks[0]
    assert found.slot is not None
    first.client.arena.slot(found.slot.slot)[17] ^= 1
    reading = await read_chunk(second.client, planned("a"), found)
    assert (reading.outcome, reading.payload) == (ChunkOutcome.CORRUPT, None)
    await second.client.release(acquired.lease_id)
    await until(lambda: slots_of(first) == (8, 0, 0, 0), what="it is withdrawn there")


async def test_what_is_kept_is_copied_and_then_serves_decode_here(pair: tuple[Node, Node]) -> None:
    first, second = pair
    await written(first, "a")
    kept = await second.client.acquire(REQUEST, second.wanted("a", sources=[first.source]), keep=True)
    assert kept.chunks[0].slot is not None
    assert (kept.chunks[0].slot.arena, kept.chunks[0].num_bytes_moved) == (None, CHUNK_BYTES)
    local = await acquire(second, first, "a")
    assert local.chunks[0].outcome is ChunkOutcome.HIT_LOCAL


async def test_where_one_of_two_waiting_wants_to_keep_it_both_get_the_copy(pair: tuple[Node, Node]) -> None:
    first, second = pair
    await written(first, "a")
    wanted = second.wanted("a", sources=[first.source])
    both = await asyncio.gather(
        second.client.acquire(REQUEST, wanted, keep=False), second.client.acquire(REQUEST, wanted, keep=True)
    )
    slots = [acquired.chunks[0].slot for acquired in both]
    assert all(slot is not None and slot.arena is None for slot in slots)
    await second.client.release(*(acquired.lease_id for acquired in both))
    assert slots_of(second) == (7, 0, 1, 0)


async def test_two_readers_share_one_loan_until_the_last_lets_go(pair: tuple[Node, Node]) -> None:
    first, second = pair
    await written(first, "a")
    both = await asyncio.gather(acquire(second, first, "a"), acquire(second, first, "a"))
    assert num_leases(first) == 1
    await second.client.release(both[0].lease_id)
    slot = both[1].chunks[0].slot
    assert slot is not None
    assert second.client.holds(slot)
    assert slots_of(first) == (7, 0, 0, 1)
    await second.client.release(both[1].lease_id)
    await until(lambda: num_leases(first) == 0)


@pytest.mark.parametrize("case", ["setting", "host", "old reader"])
async def test_where_it_can_not_be_or_is_not_wanted_a_copy_is_made(
    broker: MemoryBroker, tmp_path: Path, case: str
) -> None:
    settings: dict[str, dict[str, object]] = {"setting": {"read_in_place": False}, "host": {"host": "host-2"}}
    async with two_nodes(broker, tmp_path, **settings.get(case, {})) as (first, second):
        await written(first, "a")
        if case == "old reader":
            wanted = tuple(second.wanted("a", sources=[first.source]))
            request: Message = Acquire(request_id=REQUEST, holder=WorkerId("w"), chunks=wanted, lease_s=5.0, keep=False)
            subject = f"{subjects.kv_tier(NodeId('node-b'))}.acquire"
            chunk: AcquiredChunk = (await call(second.bus, subject, request, Acquired, timeout_s=5)).chunks[0]
        else:
            chunk = (await acquire(second, first, "a")).chunks[0]
        assert chunk.slot is not None
        assert (chunk.outcome, chunk.slot.arena, chunk.num_bytes_moved) == (HIT_REMOTE, None, CHUNK_BYTES)
        assert bytes(second.client.payload(chunk.slot)) == content_of("a")


async def test_a_reader_that_can_not_see_that_arena_gets_a_copy_instead(
    broker: MemoryBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_nodes(broker, tmp_path) as (first, second):
        await written(first, "a")
        first.client.arena.path.chmod(0)
        monkeypatch.setattr("halfmoon.pool.neighbours.Path", _elsewhere)
        chunk = (await acquire(second, first, "a")).chunks[0]
        assert chunk.slot is not None
        assert (chunk.outcome, chunk.slot.arena) == (HIT_REMOTE, None)
        assert bytes(second.client.payload(chunk.slot)) == content_of("a")
        await until(lambda: num_leases(first) == 0)


def _elsewhere(path: str) -> Path:
    """As seen from a container with another /dev/shm."""
    return Path("/nowhere") / Path(path).name


async def test_the_readers_node_gives_back_what_it_borrowed_when_it_stops(broker: MemoryBroker, tmp_path: Path) -> None:
    async with running_node(broker, tmp_path, "node-a") as first:
        await written(first, "a")
        async with running_node(broker, tmp_path, "node-b") as second:
            reader = PoolClient(second.bus, NodeId("node-b"), WorkerId("w"))
            await reader.describe()
            acquired = await reader.acquire(REQUEST, second.wanted("a", sources=[first.source]), keep=False)
            slot = acquired.chunks[0].slot
            assert slot is not None
            view = reader.payload(slot)
            await second.service.stop()
            assert num_leases(first) == 0
            await reader.close()
            assert bytes(view) == content_of("a"), "a view stays valid memory"


async def test_the_arena_of_a_node_that_has_gone_is_let_go(broker: MemoryBroker, tmp_path: Path) -> None:
    async with running_node(broker, tmp_path, "node-b") as second:
        async with running_node(broker, tmp_path, "node-a") as first:
            await written(first, "a")
            slot = (await acquire(second, first, "a")).chunks[0].slot
            assert slot is not None
        assert len(second.client._neighbours) == 1
        await second.client.acquire(REQUEST, second.wanted("b"), keep=False)
        assert len(second.client._neighbours) == 0
        assert not second.client.holds(slot)
