"""Logits into tokens."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.engine.torch.sampling import Draw, sample, uniform
from halfmoon.schemas.requests import Sampling

VOCABULARY = 20
SEEDS = range(4000)


@pytest.fixture
def logits() -> torch.Tensor:
    return 2 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3))


def draw_many(logits: torch.Tensor, sampling: Sampling) -> Counter[int]:
    draws = [Draw(sampling, seed, position=0) for seed in SEEDS]
    return Counter(drawn.token for drawn in sample(logits.expand(len(draws), -1), draws))


def distance(counts: Counter[int], probabilities: torch.Tensor) -> float:
    """Total variation between what was drawn and what should be."""
    total = counts.total()
    return 0.5 * sum(abs(counts[token] / total - float(p)) for token, p in enumerate(probabilities))


def ideal(logits: torch.Tensor, temperature: float, kept: list[int]) -> torch.Tensor:
    masked = torch.full((VOCABULARY,), -math.inf, dtype=torch.float64)
    masked[kept] = logits[kept].double() / temperature
    return masked.softmax(-1)


def ranked(logits: torch.Tensor) -> list[int]:
    order: list[int] = logits.argsort(descending=True, stable=True).tolist()
    return order


def nucleus(logits: torch.Tensor, temperature: float, top_p: float, among: list[int]) -> list[int]:
    """The smallest set of likeliest tokens whose probability reaches `top_p`, one by one."""
    probabilities = ideal(logits, temperature, among)
    kept, total = [], 0.0
    for token in among:
        kept.append(token)
        total += float(probabilities[token])
        if total >= top_p:
            break
    return kept


def test_numbers_are_uniform_over_seeds_and_over_positions() -> None:
    for numbers in (
        [uniform(seed, 0) for seed in range(10_000)],
        [uniform(7, position) for position in range(10_000)],
        [uniform(-seed, seed) for seed in range(10_000)],
    ):
        assert all(0 <= number < 1 for number in numbers)
        counts = Counter(int(number * 20) for number in numbers)
        chi_squared = sum((counts[bin_] - 500) ** 2 / 500 for bin_ in range(20))
        assert chi_squared < 43.8  # 19 degrees of freedom, p = 0.001; the numbers are fixed, so is the outcome


def test_numbers_never_change() -> None:
    """A continuation may run on another version: these are part of what a seed means."""
    assert [uniform(0, 0), uniform(1, 0), uniform(0, 1), uniform(-(2**63), 2**31)] == [
        0.0564663990004608,
        0.6487508310490744,
        0.44008326622012284,
        0.45545296233006205,
    ]


def test_greedy_takes_the_likeliest_whatever_the_rest_says(logits: torch.Tensor) -> None:
    sampling = Sampling(temperature=0.0, top_k=3, top_p=0.5)
    drawn = sample(logits.expand(4, -1), [Draw(sampling, seed, seed) for seed in range(4)])
    assert [each.token for each in drawn] == [int(logits.argmax())] * 4


def test_of_equal_logits_greedy_takes_the_first() -> None:
    assert sample(torch.tensor([[1.0, 5.0, 5.0]]), [Draw(Sampling(temperature=0.0), 0, 0)])[0].token == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature(logits: torch.Tensor, temperature: float) -> None:
    counts = draw_many(logits, Sampling(temperature=temperature))
    assert distance(counts, ideal(logits, temperature, list(range(VOCABULARY)))) < 0.04


@pytest.mark.parametrize("top_k", [1, 2, 7, VOCABULARY, VOCABULARY + 5])
def test_top_k_keeps_the_likeliest(logits: torch.Tensor, top_k: int) -> None:
    counts = draw_many(logits, Sampling(temperature=1.0, top_k=top_k))
    kept = ranked(logits)[:top_k]
    assert set(counts) <= set(kept)
    assert distance(counts, ideal(logits, 1.0, kept)) < 0.04


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.6, 0.9, 0.999])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_top_p_keeps_the_smallest_set_that_reaches_it(logits: torch.Tensor, top_p: float, temperature: float) -> None:
    counts = draw_many(logits, Sampling(temperature=temperature, top_p=top_p))
    kept = nucleus(logits, temperature, top_p, ranked(logits))
    assert set(counts) <= set(kept)
    assert distance(counts, ideal(logits, temperature, kept)) < 0.04


def test_top_p_is_of_what_top_k_has_left(logits: torch.Tensor) -> None:
    counts = draw_many(logits, Sampling(temperature=1.0, top_k=5, top_p=0.8))
    kept = nucleus(logits, 1.0, 0.8, ranked(logits)[:5])
    assert set(counts) <= set(kept)
    assert distance(counts, ideal(logits, 1.0, kept)) < 0.04


@given(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 10_000),
    st.integers(1, 12),
    st.sampled_from([Sampling(temperature=1.3), Sampling(temperature=0.8, top_k=10, top_p=0.9)]),
)
def test_a_token_depends_on_seed_and_position_not_on_the_batch(
    seed: int, position: int, batch: int, sampling: Sampling
) -> None:
    rows = torch.randn((batch, VOCABULARY), generator=torch.Generator().manual_seed(batch))
    at = seed % batch
    draws = [Draw(Sampling(temperature=0.0), row, row) for row in range(batch)]
    draws[at] = Draw(sampling, seed, position)
    [alone] = sample(rows[at : at + 1], [draws[at]])
    assert sample(rows, draws)[at] == alone


def test_logprobs_are_those_of_the_model(logits: torch.Tensor) -> None:
    """Of the model's own distribution: temperature and truncation choose, they don't change what is reported."""
    expected = logits.log_softmax(-1)
    sampling = Sampling(temperature=1.7, top_k=4, logprobs=6)
    for seed in range(20):
        [drawn] = sample(logits[None], [Draw(sampling, seed, 0)])
        assert drawn.logprob is not None
        assert drawn.logprob.token == drawn.token
        assert drawn.logprob.logprob == float(expected[drawn.token])
        assert [each.token for each in drawn.logprob.top] == ranked(logits)[:6]
        assert [each.logprob for each in drawn.logprob.top] == [
            float(expected[each.token]) for each in drawn.logprob.top
        ]


def test_logprobs_only_where_asked_for(logits: torch.Tensor) -> None:
    asked = [Sampling(temperature=0.0, logprobs=count) for count in (None, 0, 2)]
    drawn = sample(logits.expand(3, -1), [Draw(each, 0, 0) for each in asked])
    assert drawn[0].logprob is None
    assert drawn[1].logprob is not None
    assert drawn[1].logprob.top == ()
    assert drawn[2].logprob is not None
    assert len(drawn[2].logprob.top) == 2


def test_half_precision_logits_are_taken_as_they_are(logits: torch.Tensor) -> None:
    half = logits.bfloat16()
    [drawn] = sample(half[None], [Draw(Sampling(temperature=0.0, logprobs=0), 0, 0)])
    assert drawn.logprob is not None
    assert drawn.logprob.logprob == float(half.float().log_softmax(-1)[drawn.token])


def test_certain_logits_leave_no_choice() -> None:
    logits = torch.full((1, VOCABULARY), -math.inf)
    logits[0, 17] = 0.0
    for seed in range(50):
        assert sample(logits, [Draw(Sampling(temperature=1.0), seed, 0)])[0].token == 17
        assert sample(logits, [Draw(Sampling(temperature=1.0, top_p=0.9, top_k=9), seed, 0)])[0].token == 17


def by_sorting_all(logits: torch.Tensor, draw: Draw) -> int:
    """The same choice, spelled out: sort everything, cut, invert."""
    scaled = (logits.double() / draw.sampling.temperature).tolist()
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    order = order[: draw.sampling.top_k or None]
    probabilities = torch.tensor([scaled[token] for token in order], dtype=torch.float64).softmax(-1).tolist()
    kept, before = [], 0.0
    for probability in probabilities:
        if before >= draw.sampling.top_p:
            break
        kept.append(probability)
        before += probability
    point, reached = uniform(draw.seed, draw.position) * sum(kept), 0.0
    for token, probability in zip(order, kept, strict=False):
        reached += probability
        if reached > point:
            return token
    raise AssertionError("the point lies within the sum")


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0], ids=["flat", "even", "peaked"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, top_p=0.2),
        Sampling(temperature=0.7, top_p=0.95),
        Sampling(temperature=1.0, top_k=300),
        Sampling(temperature=1.5, top_k=300, top_p=0.5),
    ],
)
def test_a_large_vocabulary_is_cut_as_if_all_of_it_were_sorted(spread: float, sampling: Sampling) -> None:
    """Flat logits keep thousands of tokens; rounded ones are equal in heaps."""
    generator = torch.Generator().manual_seed(9)
    logits = (spread * torch.randn(3000, generator=generator) * 8).round() / 8
    for seed in range(25):
        draw = Draw(sampling, seed, position=seed)
        assert sample(logits[None], [draw])[0].token == by_sorting_all(logits, draw)
