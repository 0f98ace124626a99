"""Sampled tokens depend on (seed, position) alone and are the torch engine's; logprobs are transformers'."""

import asyncio
import json
import subprocess
import sys

import pytest

from halfmoon.schemas.requests import Sampling
from support.engines import CHUNK_TOKENS, GREEDY, generated, started, token_ids
from support.model import small_model
from support.prompts import random_tokens
from support.vllm import Pair, root_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
]

PROMPT = random_tokens(CHUNK_TOKENS + 3, seed=300)
OTHERS = [random_tokens(count, seed=310 + count) for count in (1, 30, CHUNK_TOKENS)]
SAMPLINGS = {
    "temperature": Sampling(temperature=1.0, max_tokens=12, ignore_eos=True),
    "top_p": Sampling(temperature=1.2, top_p=0.8, max_tokens=12, ignore_eos=True),
    "top_k": Sampling(temperature=0.9, top_k=20, top_p=0.95, max_tokens=12, ignore_eos=True),
}

LOGPROBS_SCRIPT = """
import json, sys, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
request = json.load(sys.stdin)
with torch.no_grad():
    logits = model(torch.tensor([request["tokens"]])).logits[0]
json.dump(logits[request["first"] :].log_softmax(dim=-1).topk(10).values.tolist(), sys.stdout)
"""


@pytest.mark.parametrize("name", SAMPLINGS)
async def test_the_same_seed_says_the_same_in_any_company(pair: Pair, name: str) -> None:
    sampling = SAMPLINGS[name]
    alone = token_ids(await generated(pair.decode, PROMPT, sampling, seed=11, root=root_of(f"alone {name}")))
    together = await asyncio.gather(
        *(
            generated(pair.decode, other, sampling, seed=at, seq_id=f"o{at}", root=root_of(f"other {name}"))
            for at, other in enumerate(OTHERS)
        ),
        generated(pair.decode, PROMPT, sampling, seed=11, seq_id="same", root=root_of(f"beside {name}")),
        generated(pair.decode, PROMPT, sampling, seed=12, seq_id="different", root=root_of(f"beside {name}")),
        generated(pair.decode, PROMPT, GREEDY, seq_id="greedy", root=root_of(f"beside {name}")),
    )
    *_, same, different, greedy = (token_ids(answer) for answer in together)
    assert same == alone
    assert different != alone
    assert greedy == token_ids(await generated(pair.decode, PROMPT, GREEDY))
    resumed = await generated(
        pair.prefill, [*PROMPT, *alone[:5]], sampling, seed=11, num_known=5, root=root_of(f"resumed {name}")
    )
    assert [each.position for each in resumed] == list(range(5, 12))
    assert token_ids(resumed) == alone[5:], "a continuation on another engine"


async def test_sampled_tokens_are_those_of_the_torch_engine(pair: Pair) -> None:
    """Where rounding leaves them no choice: among thousands of candidates, ranked, the engines' last bits decide."""
    async with started("torch", small_model()) as torch_engine:
        for name in ("temperature", "top_k"):
            sampling = SAMPLINGS[name]
            for seed in (1, -(2**62), 2**63 - 1):
                ours = await generated(pair.decode, PROMPT, sampling, seed=seed, root=root_of("against torch"))
                theirs = await generated(torch_engine, PROMPT, sampling, seed=seed)
                assert token_ids(ours) == token_ids(theirs), (name, seed)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_logprobs_are_those_of_transformers(pair: Pair, temperature: float) -> None:
    """Of the model's own distribution: before temperature and cuts."""
    sampling = Sampling(temperature=temperature, top_p=0.9, max_tokens=5, logprobs=4, ignore_eos=True)
    sampled = await generated(pair.decode, PROMPT, sampling, seed=3)
    tokens = [*PROMPT, *token_ids(sampled)[:-1]]
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", LOGPROBS_SCRIPT, str(small_model())],
        input=json.dumps({"tokens": tokens, "first": len(PROMPT) - 1}),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    expected = json.loads(done.stdout)
    assert len(expected) == len(sampled) == 5
    for each, values in zip(sampled, expected, strict=True):
        assert each.logprob is not None
        assert each.logprob.token == each.token
        assert [rival.logprob for rival in each.logprob.top] == pytest.approx(values[:4], abs=1e-3)
        assert len({rival.token for rival in each.logprob.top}) == 4
        if temperature == 0.0:
            assert each.logprob.top[0].token == each.token
        own = [rival.logprob for rival in each.logprob.top if rival.token == each.token]
        if own:
            assert each.logprob.logprob == pytest.approx(own[0], abs=1e-6)
        assert each.logprob.logprob <= values[0] + 1e-3


@pytest.mark.parametrize("num_top", [None, 0, 1])
async def test_logprobs_come_as_asked_for(pair: Pair, num_top: int | None) -> None:
    sampled = await generated(pair.decode, OTHERS[0], Sampling(temperature=0.0, max_tokens=2, logprobs=num_top))
    for each in sampled:
        if num_top is None:
            assert each.logprob is None
        else:
            assert each.logprob is not None
            assert each.logprob.logprob < 0
            assert len(each.logprob.top) == num_top
