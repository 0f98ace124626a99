"""vLLM's greedy tokens equal plain `generate`'s, whatever was loaded, hot, and served beside."""

import asyncio
from contextlib import aclosing

import pytest

from halfmoon.chunks.keys import chunk_keys
from halfmoon.engine.contract import SequenceSpec
from halfmoon.schemas.ids import ChunkKey
from halfmoon.schemas.requests import Sampling
from support.engines import BLOCK_TOKENS, CHUNK_TOKENS, generated, prefilled, sinks_for, token_ids
from support.model import small_model
from support.prompts import lengths, random_tokens
from support.reference import greedy
from support.slots import Slots, checksums
from support.vllm import Pair, answered, root_of
from support.wait import until

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

MAX_TOKENS = 6
PROMPTS = {count: random_tokens(count, seed=4000 + count) for count in [*lengths(CHUNK_TOKENS), 3 * CHUNK_TOKENS - 1]}
SHARED = random_tokens(2 * CHUNK_TOKENS, seed=70)
"""The beginning of four prompts; four others share nothing."""
EIGHT = [
    *([*SHARED, *random_tokens(count, seed=71 + count)] for count in (1, 20, CHUNK_TOKENS, CHUNK_TOKENS + 3)),
    *(random_tokens(count, seed=80 + count) for count in (5, CHUNK_TOKENS, CHUNK_TOKENS + 9, 2 * CHUNK_TOKENS + 1)),
]
LONG = random_tokens(6 * CHUNK_TOKENS + 9, seed=90)


@pytest.fixture(scope="session")
def references() -> dict[tuple[int, ...], list[int]]:
    """All of this file's, computed together."""
    prompts = [*PROMPTS.values(), *EIGHT, LONG]
    return dict(zip(map(tuple, prompts), greedy(small_model(), prompts, MAX_TOKENS), strict=True))


def hot_tokens(prompt: list[int]) -> int:
    """What vLLM's prefix cache gives of a prompt that it has served: whole blocks, and never the last token."""
    return (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("count", PROMPTS)
async def test_each_length_in_each_cache_state(
    pair: Pair, slots: Slots, references: dict[tuple[int, ...], list[int]], count: int
) -> None:
    prompt = PROMPTS[count]
    expected = references[tuple(prompt)]

    def root(case: str) -> bytes:
        return root_of(f"{case} {count}")

    assert await answered(pair.decode, prompt, root("cold")) == (0, expected)
    assert await answered(pair.decode, prompt, root("cold")) == (hot_tokens(prompt), expected), "hot"
    chunks = await prefilled(pair.prefill, prompt, root=root("prefill"), memory=slots.memory)
    written = checksums(chunks)
    assert await answered(pair.decode, prompt, root("all"), loaded=chunks) == (0, expected), "all loaded"
    assert await answered(pair.decode, prompt, root("all"), loaded=chunks) == (hot_tokens(prompt), expected)
    assert await answered(pair.decode, prompt, root("part"), loaded=chunks[:1]) == (0, expected), "partly loaded"
    whole = [chunk for chunk in chunks if chunk.num_tokens == CHUNK_TOKENS]
    behind = await prefilled(pair.prefill, prompt, loaded=whole[:1], root=root("prefill behind"), memory=slots.memory)
    assert await answered(pair.decode, prompt, root("behind"), loaded=behind) == (0, expected)
    again = await prefilled(pair.prefill, prompt, root=root("prefill"), memory=slots.memory)
    num_hot = hot_tokens(prompt) // CHUNK_TOKENS
    assert checksums(again)[:num_hot] == written[:num_hot], "copied out of the prefix cache"
    assert checksums(chunks) == written, "loading changes nothing"


async def test_a_hot_beginning_is_completed_by_what_is_loaded(
    pair: Pair, slots: Slots, references: dict[tuple[int, ...], list[int]]
) -> None:
    """The prefix cache holds one chunk and a half of the prompt, the pool all of it."""
    prompt = PROMPTS[3 * CHUNK_TOKENS + 7]
    root = root_of("half hot")
    chunks = await prefilled(pair.prefill, prompt, root=root, memory=slots.memory)
    await answered(pair.decode, prompt[: CHUNK_TOKENS + BLOCK_TOKENS + 1], root)
    num_hot, tokens = await answered(pair.decode, prompt, root, loaded=chunks)
    assert num_hot == CHUNK_TOKENS + BLOCK_TOKENS
    assert tokens == references[tuple(prompt)]


async def test_eight_at_once(pair: Pair, slots: Slots, references: dict[tuple[int, ...], list[int]]) -> None:
    """Shared and different prefixes, cold, partly and wholly loaded, prefilled at once and decoded at once; twice."""
    root = root_of("eight")
    expected = [references[tuple(prompt)] for prompt in EIGHT]
    chunks = await asyncio.gather(
        *(
            prefilled(pair.prefill, prompt, seq_id=f"p{at}", root=root, memory=slots.memory)
            for at, prompt in enumerate(EIGHT)
        )
    )
    for turn in range(2):
        answers = await asyncio.gather(
            *(
                answered(pair.decode, prompt, root, loaded=chunks[at][: (at + turn) % 4], seq_id=f"d{at}")
                for at, prompt in enumerate(EIGHT)
            )
        )
        assert [tokens for _, tokens in answers] == expected
    assert [num_hot for num_hot, _ in answers] == [hot_tokens(prompt) for prompt in EIGHT]


@pytest.mark.parametrize("engine", ["prefill", "decode"])
async def test_chunks_are_written_as_steps_finish(
    pair: Pair, slots: Slots, references: dict[tuple[int, ...], list[int]], engine: str
) -> None:
    """A step computes one chunk of the seven, or one and a half."""
    prefiller = pair.prefill if engine == "prefill" else pair.decode
    root = root_of(f"steps {engine}")
    sinks = sinks_for(prefiller, 0, len(LONG) - 1, slots.memory)
    prefiller.open(SequenceSpec("steps", LONG, len(LONG), num_loadable=0, has_sinks=True, root=root))
    try:
        async with aclosing(prefiller.prefill("steps", 0, len(LONG) - 1, sinks)) as written:  # type: ignore[type-var]
            first = await anext(written)
            assert any(sinks[0].payload)
            assert not any(sinks[-1].payload), "the first chunk comes long before the last is computed"
            rest = [chunk async for chunk in written]
    finally:
        await prefiller.close("steps")
    assert [chunk.index for chunk in (first, *rest)] == list(range(7))
    finished = [chunk.finished_ns for chunk in (first, *rest)]
    assert finished == sorted(finished)
    assert not any(chunk.is_hot for chunk in (first, *rest))
    other = pair.decode if engine == "prefill" else pair.prefill
    assert await answered(other, LONG, root_of(f"steps of {engine}"), loaded=sinks) == (0, references[tuple(LONG)])


async def test_a_continuation_goes_on_as_if_uninterrupted(
    pair: Pair, references: dict[tuple[int, ...], list[int]]
) -> None:
    prompt = PROMPTS[CHUNK_TOKENS + 1]
    expected = references[tuple(prompt)]
    rest = await generated(pair.decode, [*prompt, *expected[:2]], num_known=2)
    assert [each.position for each in rest] == [2, 3, 4, 5]
    assert token_ids(rest) == expected[2:]


async def test_stop_tokens_and_limits_end_it(pair: Pair, references: dict[tuple[int, ...], list[int]]) -> None:
    prompt = PROMPTS[CHUNK_TOKENS + 1]
    expected = references[tuple(prompt)]
    stopped = await generated(pair.decode, prompt, stop_tokens=frozenset({expected[2]}))
    assert token_ids(stopped) == expected[: expected.index(expected[2]) + 1]
    one = await generated(pair.decode, prompt, Sampling(temperature=0.0, max_tokens=1))
    assert token_ids(one) == expected[:1]


async def test_tenants_share_nothing(pair: Pair, references: dict[tuple[int, ...], list[int]]) -> None:
    """What one tenant's request has left in the prefix cache is hot for that tenant, and for no other."""
    prompt = PROMPTS[2 * CHUNK_TOKENS]
    expected = references[tuple(prompt)]
    ours, theirs = root_of("tenant a"), root_of("tenant b")
    assert await answered(pair.decode, prompt, ours) == (0, expected)
    assert await answered(pair.decode, prompt, ours) == (hot_tokens(prompt), expected)
    assert await answered(pair.decode, prompt, theirs) == (0, expected)
    assert await answered(pair.decode, prompt, theirs) == (hot_tokens(prompt), expected)


async def test_what_is_forgotten_is_found_by_no_later_sequence(
    pair: Pair, references: dict[tuple[int, ...], list[int]]
) -> None:
    """And is told to be gone; what comes after it is cached, and told, as ever."""
    prompt, root = PROMPTS[2 * CHUNK_TOKENS], root_of("forgotten")
    expected = references[tuple(prompt)]
    keys = frozenset(chunk_keys(root, prompt[: hot_tokens(prompt)], CHUNK_TOKENS))
    told: set[ChunkKey] = set()

    def is_told() -> bool:
        changes = pair.decode.hot_changes()
        if changes.is_reset:
            told.clear()
        told.difference_update(changes.removed)
        told.update(changes.added)
        return keys <= told

    assert await answered(pair.decode, prompt, root) == (0, expected)
    await until(is_told)
    assert pair.decode.forget() >= len(keys) > 0
    assert not is_told()
    assert not told
    assert await answered(pair.decode, prompt, root) == (0, expected)
    assert await answered(pair.decode, prompt, root) == (hot_tokens(prompt), expected)
    await until(is_told)
