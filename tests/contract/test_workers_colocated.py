"""The colocated role: one worker computes and generates in one sequence, and shares its chunks with the cluster."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from halfmoon.bus import endpoint
from halfmoon.bus.endpoint import Envelope
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkPlacement
from halfmoon.schemas.registry import LookedUp, Lookup
from halfmoon.schemas.splits import DecodeHalf, Role
from support.exact_engine import CHUNK_TOKENS, reference
from support.workers import SEED, Cluster, Reader, cluster, prompt

TOKENS = prompt(3 * CHUNK_TOKENS + 5)
EXPECTED = reference(TOKENS, 6, SEED)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, decode_settings={"role": Role.COLOCATED}) as running:
        yield running


async def answer_lookups(pair: Cluster) -> None:
    """A registry of what the two pools hold now."""

    async def lookup(message: Lookup, envelope: Envelope) -> LookedUp:
        found = []
        for key in message.keys:
            places = []
            for node in (pair.node_a, pair.node_b):
                slot = node.service.store.ledger.slots.find(key)
                if slot is not None and slot.meta is not None:
                    places.append(ChunkPlacement(node=node.source.node, epoch=node.source.epoch, chunk=slot.meta))
            found.append(tuple(places))
        return LookedUp(placements=tuple(found))

    await endpoint.serve(pair.bus, subjects.registry("lookup"), Lookup, lookup)


async def complete(pair: Cluster) -> tuple[DecodeHalf, Reader]:
    _, half = pair.halves(TOKENS, prefill_worker=None)
    reader = await pair.listen(half.reply)
    await pair.send_decode(half)
    await reader.finished()
    await pair.idle()
    return half, reader


async def test_cold_then_local_then_remote(pair: Cluster) -> None:
    await answer_lookups(pair)
    _, cold = await complete(pair)
    assert cold.tokens == EXPECTED
    assert (await cold.finished()).usage.cached_tokens == 0
    assert pair.decode_engine.prefilled == [(0, 3 * CHUNK_TOKENS)]
    assert pair.decode_engine.decoded_from == [3 * CHUNK_TOKENS]
    assert (await pair.node_b.client.stats()).num_chunks == 3

    _, warm = await complete(pair)
    assert warm.tokens == EXPECTED
    assert (await warm.finished()).usage.cached_tokens == 3 * CHUNK_TOKENS
    assert len(pair.decode_engine.prefilled) == 1
    assert (await pair.node_b.client.stats()).bytes_pulled == 0
    ended = pair.ended_of(Role.COLOCATED)[-1]
    assert (ended.num_reused_tokens, ended.num_computed_tokens) == (3 * CHUNK_TOKENS, 5)


async def test_what_another_node_has_is_pulled(pair: Cluster) -> None:
    await answer_lookups(pair)
    _, _, first = await pair.submit(TOKENS)
    await first.finished()
    await pair.idle()
    assert (await pair.node_b.client.stats()).num_chunks == 0
    pulled_before = (await pair.node_b.client.stats()).bytes_pulled
    _, second = await complete(pair)
    assert second.tokens == EXPECTED
    assert (await second.finished()).usage.cached_tokens == 3 * CHUNK_TOKENS
    stats = await pair.node_b.client.stats()
    assert stats.num_chunks == 3
    assert stats.bytes_pulled > pulled_before
    assert pair.decode_engine.prefilled == []


async def test_without_a_registry_its_own_node_still_serves(pair: Cluster) -> None:
    for cached_tokens in (0, 3 * CHUNK_TOKENS):
        _, reader = await complete(pair)
        assert reader.tokens == EXPECTED
        assert (await reader.finished()).usage.cached_tokens == cached_tokens


async def test_a_pool_without_room_costs_nothing_but_the_cache(tmp_path: Path) -> None:
    async with cluster(tmp_path, num_slots_b=2, decode_settings={"role": Role.COLOCATED}) as pair:
        _, reader = await complete(pair)
        assert reader.tokens == EXPECTED
        assert pair.decode_engine.prefilled == [(0, 2 * CHUNK_TOKENS)]
        assert pair.decode_engine.decoded_from == [2 * CHUNK_TOKENS]
