"""The torch engine's greedy tokens equal plain `generate`'s, whatever was loaded and whoever else is served."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from halfmoon.engine.contract import Engine
from halfmoon.schemas.requests import Sampling
from support.engines import CHUNK_TOKENS, generated, prefilled, started, token_ids
from support.model import small_model
from support.prompts import lengths, random_tokens
from support.reference import greedy

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

MAX_TOKENS = 6
PROMPTS = {count: random_tokens(count, seed=4000 + count) for count in lengths(CHUNK_TOKENS)}


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    return dict(zip(PROMPTS, greedy(small_model(), list(PROMPTS.values()), MAX_TOKENS), strict=True))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def prefiller() -> AsyncIterator[Engine]:
    async with started("torch", small_model()) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def decoder() -> AsyncIterator[Engine]:
    async with started("torch", small_model()) as engine:
        yield engine


@pytest.mark.parametrize("count", PROMPTS)
async def test_alone(prefiller: Engine, decoder: Engine, expected: dict[int, list[int]], count: int) -> None:
    prompt = PROMPTS[count]
    assert token_ids(await generated(decoder, prompt)) == expected[count], "cold"
    chunks = await prefilled(prefiller, prompt)
    assert token_ids(await generated(decoder, prompt, loaded=chunks)) == expected[count], "all loaded"
    assert token_ids(await generated(decoder, prompt, loaded=chunks[:1])) == expected[count], "partly loaded"
    whole = [chunk for chunk in chunks if chunk.num_tokens == CHUNK_TOKENS]
    behind = await prefilled(prefiller, prompt, loaded=whole[:1])
    assert token_ids(await generated(decoder, prompt, loaded=behind)) == expected[count], (
        "prefilled behind a cached chunk"
    )


async def test_eight_at_once(prefiller: Engine, decoder: Engine, expected: dict[int, list[int]]) -> None:
    """Sequences of different lengths in the same steps, some cold, some loaded; prefills at once as well."""
    counts = [*PROMPTS, 3 * CHUNK_TOKENS + 7, 2 * CHUNK_TOKENS]
    chunks = await asyncio.gather(
        *(prefilled(prefiller, PROMPTS[count], seq_id=f"p{at}") for at, count in enumerate(counts))
    )
    answers = await asyncio.gather(
        *(
            generated(decoder, PROMPTS[count], loaded=chunks[at][: at % 3], seq_id=f"d{at}")
            for at, count in enumerate(counts)
        )
    )
    assert [token_ids(answer) for answer in answers] == [expected[count] for count in counts]


async def test_a_continuation_goes_on_as_if_uninterrupted(decoder: Engine, expected: dict[int, list[int]]) -> None:
    prompt, tokens = PROMPTS[CHUNK_TOKENS + 1], expected[CHUNK_TOKENS + 1]
    rest = await generated(decoder, [*prompt, *tokens[:2]], num_known=2)
    assert [each.position for each in rest] == [2, 3, 4, 5]
    assert token_ids(rest) == tokens[2:]


async def test_a_seeded_continuation_goes_on_as_if_uninterrupted(decoder: Engine) -> None:
    prompt = PROMPTS[CHUNK_TOKENS]
    sampling = Sampling(temperature=0.9, top_p=0.95, top_k=50, max_tokens=6)
    alone = token_ids(await generated(decoder, prompt, sampling, seed=11))
    others = [
        generated(decoder, PROMPTS[count], sampling, seed=count, seq_id=f"other {count}") for count in (1, 65, 128)
    ]
    resumed, *_ = await asyncio.gather(
        generated(decoder, [*prompt, *alone[:3]], sampling, seed=11, num_known=3), *others
    )
    assert token_ids(resumed) == alone[3:]


async def test_stop_tokens_and_limits_end_it(decoder: Engine, expected: dict[int, list[int]]) -> None:
    prompt, tokens = PROMPTS[CHUNK_TOKENS + 1], expected[CHUNK_TOKENS + 1]
    stopped = await generated(decoder, prompt, stop_tokens=frozenset({tokens[2]}))
    assert token_ids(stopped) == tokens[: tokens.index(tokens[2]) + 1]
    one = await generated(decoder, prompt, Sampling(temperature=0.0, max_tokens=1))
    assert token_ids(one) == tokens[:1]


async def test_logprobs_come_with_the_tokens(decoder: Engine) -> None:
    sampled = await generated(decoder, PROMPTS[1], Sampling(temperature=0.0, max_tokens=3, logprobs=4))
    for each in sampled:
        assert each.logprob is not None
        assert each.logprob.token == each.token == each.logprob.top[0].token
        assert each.logprob.logprob == each.logprob.top[0].logprob
        assert len(each.logprob.top) == 4
