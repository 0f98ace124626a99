"""Right text, always: token ids equal plain transformers', whatever was cached, moved or computed."""

from pathlib import Path

import pytest

from support.halves import Halves, halves
from support.outside import outside_client
from support.prompts import lengths, random_tokens
from support.reference import greedy
from support.system import System

pytestmark = [pytest.mark.timeout(300), pytest.mark.model]

CHUNK_TOKENS = 64
MAX_TOKENS = 6
MODEL = "SmolLM2-135M-Instruct"
GREEDY = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
ASKED = {count: random_tokens(count, 100 + count) for count in lengths(CHUNK_TOKENS)}
SENT = {count: random_tokens(count, 7000 + count) for count in lengths(CHUNK_TOKENS)}


def reference(model: Path, prompts: dict[int, list[int]]) -> dict[int, list[int]]:
    """What plain transformers says to each prompt. All are computed together, the first time."""
    every = greedy(model, [*ASKED.values(), *SENT.values()], MAX_TOKENS)
    said = every[: len(ASKED)] if prompts is ASKED else every[len(ASKED) :]
    return dict(zip(prompts, said, strict=True))


async def test_cold_then_cached_alone_and_eight_at_once(any_system: System, model_path: Path) -> None:
    prompts, expected = list(ASKED.values()), list(reference(model_path, ASKED).values())
    async with outside_client(any_system.nats_url, MODEL) as client:
        for prompt, tokens in zip(prompts, expected, strict=True):
            cold = await client.ask(tokens=prompt, sampling=GREEDY)
            assert cold.tokens == tokens, f"cold, {len(prompt)} tokens"
            assert cold.usage["cached_tokens"] == 0
        batch = [*prompts, prompts[-1], prompts[-2]]
        for prompt, tokens, warm in zip(
            batch, [*expected, expected[-1], expected[-2]], await client.ask_all(batch, sampling=GREEDY), strict=True
        ):
            assert warm.tokens == tokens, f"cached, {len(prompt)} tokens, eight at once"
            assert warm.usage["prompt_tokens"] == len(prompt)
            assert warm.usage["completion_tokens"] == MAX_TOKENS


@pytest.mark.parametrize("count", lengths(CHUNK_TOKENS))
async def test_local_remote_and_partly_remote(any_system: System, model_path: Path, count: int) -> None:
    """The same prompt on the node that has it; on the other with its first chunk remote, then with all of them."""
    prompt, expected = SENT[count], reference(model_path, SENT)[count]
    num_whole = count // CHUNK_TOKENS
    async with halves(any_system.nats_url) as driver:
        cold = await run(driver, prompt, "prefill-1", [])
        local = await run(driver, prompt, "prefill-1", ["node-a"] * num_whole)
        partly = await run(driver, prompt, "prefill-2", ["node-a"] * min(1, num_whole))
        remote = await run(driver, prompt, "prefill-2", ["node-a"] * num_whole)
    assert cold == local == partly == remote == expected


async def run(driver: Halves, prompt: list[int], prefill: str, reuse: list[str]) -> list[int]:
    outcome = await driver.send(prompt, prefill=prefill, decode="decode-1", reuse=reuse, max_tokens=MAX_TOKENS)
    assert outcome.ended
    return outcome.tokens
