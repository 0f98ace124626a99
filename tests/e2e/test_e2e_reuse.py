"""The three cases of a prompt's chunks: none cached, all on the node, some on another. By chunk and by byte."""

import pytest

from halfmoon.schemas.chunks import ChunkOutcome
from halfmoon.schemas.requests import Finished
from halfmoon.schemas.splits import Role
from support.halves import halves
from support.prompts import random_tokens
from support.system import System

pytestmark = [pytest.mark.timeout(300), pytest.mark.model]

CHUNK_TOKENS = 64


async def test_miss(any_system: System) -> None:
    prompt = random_tokens(3 * CHUNK_TOKENS + 7, 11)
    async with halves(any_system.nats_url) as driver:
        bytes_per_token = driver.card.kv_bytes_per_token
        before = await driver.pool("node-a"), await driver.pool("node-b")
        outcome = await driver.send(prompt, prefill="prefill-1", decode="decode-1")
        after = await driver.pool("node-a"), await driver.pool("node-b")
    assert [chunk.outcome for _, chunk in sorted(outcome.ready.items())] == [ChunkOutcome.COMPUTED] * 4
    assert [chunk.num_tokens for _, chunk in sorted(outcome.ready.items())] == [64, 64, 64, 6]
    assert outcome.ended[Role.PREFILL].num_computed_tokens == 3 * CHUNK_TOKENS + 6
    assert outcome.ended[Role.PREFILL].num_reused_tokens == 0
    # Prefill pulled nothing; decode got every chunk from node-a, the partial one too: in place, or over the network.
    assert after[0].bytes_pulled == before[0].bytes_pulled
    moved = after[1].bytes_pulled - before[1].bytes_pulled
    read_in_place = after[1].bytes_in_place - before[1].bytes_in_place
    expected = (3 * CHUNK_TOKENS + 6) * bytes_per_token
    over_tcp = "--transport=tcp" in str(any_system.process.args)
    assert (moved, read_in_place) == ((expected, 0) if over_tcp else (0, expected))
    assert isinstance(outcome.terminal, Finished)
    assert outcome.terminal.usage.cached_tokens == 0


async def test_local_hit(any_system: System) -> None:
    prompt = random_tokens(3 * CHUNK_TOKENS + 7, 12)
    async with halves(any_system.nats_url) as driver:
        await driver.send(prompt, prefill="prefill-1", decode="decode-1")
        before = await driver.pool("node-a")
        outcome = await driver.send(prompt, prefill="prefill-1", decode="decode-1", reuse=["node-a"] * 3)
        after = await driver.pool("node-a")
    assert [chunk.outcome for _, chunk in sorted(outcome.ready.items())] == [
        ChunkOutcome.HIT_LOCAL,
        ChunkOutcome.HIT_LOCAL,
        ChunkOutcome.HIT_LOCAL,
        ChunkOutcome.COMPUTED,
    ]
    assert outcome.ended[Role.PREFILL].num_computed_tokens == 6
    assert after.bytes_pulled == before.bytes_pulled
    assert isinstance(outcome.terminal, Finished)
    assert outcome.terminal.usage.cached_tokens == 3 * CHUNK_TOKENS


async def test_remote_hit_of_a_part(any_system: System) -> None:
    """Two of three whole chunks are on node-a; the prefill worker is on node-b, with the decode worker."""
    stem = random_tokens(2 * CHUNK_TOKENS, 13)
    first = stem + random_tokens(CHUNK_TOKENS, 14)
    second = stem + random_tokens(CHUNK_TOKENS + 9, 15)
    async with halves(any_system.nats_url) as driver:
        bytes_per_token = driver.card.kv_bytes_per_token
        await driver.send(first, prefill="prefill-1", decode="decode-1")
        before = await driver.pool("node-b")
        outcome = await driver.send(second, prefill="prefill-2", decode="decode-1", reuse=["node-a"] * 2)
        after = await driver.pool("node-b")
        again = await driver.send(second, prefill="prefill-2", decode="decode-1", reuse=["node-b"] * 3)
    assert [chunk.outcome for _, chunk in sorted(outcome.ready.items())] == [
        ChunkOutcome.HIT_REMOTE,
        ChunkOutcome.HIT_REMOTE,
        ChunkOutcome.COMPUTED,
        ChunkOutcome.COMPUTED,
    ]
    assert outcome.ended[Role.PREFILL].num_reused_tokens == 2 * CHUNK_TOKENS
    assert outcome.ended[Role.PREFILL].num_computed_tokens == CHUNK_TOKENS + 8
    # The two chunks moved once, to prefill; decode is on the same node, so nothing moved for it.
    assert after.bytes_pulled - before.bytes_pulled == 2 * CHUNK_TOKENS * bytes_per_token
    # What was pulled has stayed: it is a local hit now.
    assert [chunk.outcome for _, chunk in sorted(again.ready.items())][:3] == [ChunkOutcome.HIT_LOCAL] * 3
    assert again.tokens == outcome.tokens


async def test_tenants_do_not_share_and_one_tenant_does(any_system: System) -> None:
    prompt = random_tokens(2 * CHUNK_TOKENS + 1, 16)
    reuse = ["node-a"] * 2
    async with halves(any_system.nats_url) as driver:
        await driver.send(prompt, prefill="prefill-1", decode="decode-1", tenant="alpha")
        same = await driver.send(prompt, prefill="prefill-1", decode="decode-1", tenant="alpha", reuse=reuse)
        other = await driver.send(prompt, prefill="prefill-1", decode="decode-1", tenant="beta", reuse=reuse)
        remote = await driver.send(prompt, prefill="prefill-2", decode="decode-1", tenant="alpha", reuse=reuse)
        third = await driver.send(prompt, prefill="prefill-2", decode="decode-1", tenant="gamma", reuse=reuse)
    assert [chunk.outcome for chunk in same.ready.values()] == [ChunkOutcome.HIT_LOCAL] * 2
    assert [chunk.outcome for chunk in other.ready.values()] == [ChunkOutcome.COMPUTED] * 2
    assert [chunk.outcome for chunk in remote.ready.values()] == [ChunkOutcome.HIT_REMOTE] * 2
    assert [chunk.outcome for chunk in third.ready.values()] == [ChunkOutcome.COMPUTED] * 2
    assert same.tokens == other.tokens == remote.tokens == third.tokens
