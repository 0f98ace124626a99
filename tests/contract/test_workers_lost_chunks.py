"""Chunks that are damaged, gone or freed between prefill and decode cost time, never the right tokens."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from halfmoon.schemas.splits import Role
from support.exact_engine import CHUNK_TOKENS
from support.fixed_prompt import EXPECTED, TOKENS, announced, right
from support.pool_nodes import Node
from support.wait import until
from support.workers import Cluster, cluster


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Cluster]:
    settings: dict[str, object] = {"resplit_grace_s": 0.2}
    async with cluster(tmp_path, decode_settings=settings) as running:
        yield running


def damage(node: Node, index: int) -> None:
    """Flip a byte of the chunk with this index."""
    slots = node.service.store.ledger.slots
    slot = next(slot for slot in (slots[n] for n in range(len(slots))) if slot.meta and slot.meta.index == index)
    node.client.arena.slot(slot.number)[3] ^= 0xFF


def expire_leases(node: Node) -> None:
    assert node.service.store.ledger.expire(time.time_ns() + 10**15)


@pytest.mark.parametrize("index", [0, 2, 3])
async def test_a_damaged_chunk_is_computed_again(pair: Cluster, index: int) -> None:
    _, decode, reader = await announced(pair)
    damage(pair.node_a, index)
    await pair.send_decode(decode)
    await right(pair, reader, loaded_tokens=index * CHUNK_TOKENS)
    assert "corrupt" in pair.outcomes("decode")


async def test_a_damaged_cached_chunk_is_a_miss_for_prefill(pair: Cluster) -> None:
    _, _, first = await pair.submit(TOKENS)
    await first.finished()
    await pair.idle()
    damage(pair.node_a, 1)
    _, _, second = await pair.submit(TOKENS, reuse=[(pair.node_a.source,)] * 3)
    finished = await second.finished()
    await pair.idle()
    assert second.tokens == EXPECTED
    assert finished.usage.cached_tokens == CHUNK_TOKENS
    assert pair.prefill_engine.prefilled[-1] == (CHUNK_TOKENS, len(TOKENS) - 1)
    # Prefill has reported it: the copy that it made instead is the one that is found from now on.
    _, _, third = await pair.submit(TOKENS, reuse=[(pair.node_a.source,)] * 3)
    assert (await third.finished()).usage.cached_tokens == 3 * CHUNK_TOKENS
    await pair.idle()
    assert third.tokens == EXPECTED
    assert pair.prefill_engine.prefilled[-1] == (3 * CHUNK_TOKENS, len(TOKENS) - 1)
    assert pair.node_a.service.store.counters.evictions == 1


async def test_kv_that_is_gone_is_computed_again(tmp_path: Path) -> None:
    async with cluster(tmp_path, prefill_settings={"handover_timeout_s": 0.05}) as pair:
        prefill, decode = pair.halves(TOKENS)
        reader = await pair.listen(decode.reply)
        await pair.send_prefill(prefill)
        await until(lambda: pair.ended_of(Role.PREFILL), what="prefill gave up holding")
        # The partial chunk went with its lease; of the others, the last is evicted.
        store = pair.node_a.service.store
        store.evict(
            [slot.number for slot in list(store.ledger.slots.registered()) if slot.meta and slot.meta.index == 2]
        )
        await pair.send_decode(decode)
        await right(pair, reader, loaded_tokens=2 * CHUNK_TOKENS)


async def test_the_copy_that_readers_find_is_the_one_that_is_held(pair: Cluster) -> None:
    """Prefill computes what the pool has already: its own copies stay unknown, those known must not be evicted."""
    _, _, first = await pair.submit(TOKENS)
    await first.finished()
    await pair.idle()
    _, decode, reader = await announced(pair)
    assert list(pair.node_a.service.store.ledger.slots.ready()) == []
    pair.decode_engine.decoded_from.clear()
    await pair.send_decode(decode)
    await right(pair, reader, loaded_tokens=len(TOKENS) - 1)


async def test_expired_leases_are_misses(tmp_path: Path) -> None:
    """Prefill's kv-tier forgets the lease while prefill believes that it holds it."""
    async with cluster(tmp_path) as pair:
        _, decode, reader = await announced(pair)
        expire_leases(pair.node_a)
        await pair.send_decode(decode)
        await right(pair, reader, loaded_tokens=3 * CHUNK_TOKENS)


@pytest.mark.parametrize("in_place", [True, False])
async def test_a_read_slower_than_its_lease_is_not_believed(tmp_path: Path, in_place: bool) -> None:
    """Decode stalls between acquiring and loading; meanwhile the slots it reads are freed and written anew."""
    async with cluster(tmp_path, pool_settings={"read_in_place": in_place}) as pair:
        _, decode, reader = await announced(pair)
        gate = pair.decode_engine.hold("load")
        await pair.send_decode(decode)
        await until(lambda: pair.decode_engine.at.get("load") == 1)
        read_from = pair.node_a if in_place else pair.node_b
        expire_leases(read_from)
        store = read_from.service.store
        store.evict([slot.number for slot in list(store.ledger.slots.registered())])
        arena = read_from.client.arena
        for slot in range(arena.num_slots):
            arena.slot(slot)[:] = b"\x55" * arena.slot_bytes
        gate.set()
        await right(pair, reader, loaded_tokens=0)
        assert "expired" in pair.outcomes("decode")


async def test_prefill_does_not_believe_a_slow_read_either(pair: Cluster) -> None:
    _, _, first = await pair.submit(TOKENS)
    await first.finished()
    await pair.idle()
    gate = pair.prefill_engine.hold("load")
    _, _, second = await pair.submit(TOKENS, reuse=[(pair.node_a.source,)] * 3)
    await until(lambda: pair.prefill_engine.at.get("load") == 1)
    store = pair.node_a.service.store
    expire_leases(pair.node_a)
    store.evict([slot.number for slot in list(store.ledger.slots.registered())])
    gate.set()
    await second.finished()
    await pair.idle()
    assert second.tokens == EXPECTED
    assert pair.prefill_engine.prefilled[-1] == (0, len(TOKENS) - 1)
