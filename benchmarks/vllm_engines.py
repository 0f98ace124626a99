"""The torch engine against vLLM: same weights, threads and machine, turn by turn in one run, both through the contract.

Decode: tokens a second over all sequences, while all of them decode. Prefill: tokens a second up to the first token.
"""

import asyncio
import statistics
import time
from contextlib import AsyncExitStack

from benchmarks.engine import (
    BATCHES,
    NEW_TOKENS,
    PREFILL_TOKENS,
    PROMPT_TOKENS,
    decode_speed,
    default_model,
    generate,
    random_prompt,
)
from halfmoon.engine.contract import Engine
from support.engines import started

ROUNDS = 2
CHUNK_TOKENS = 512
NAMES = ("torch", "vllm")


async def _measure() -> dict[str, dict[str, float]]:
    speeds: dict[str, dict[str, list[float]]] = {}

    async def turn(name: str, engine: Engine, number: int) -> None:
        for batch in BATCHES:
            prompts = [random_prompt(PROMPT_TOKENS, seed=1000 * number + row) for row in range(batch)]
            found = decode_speed(await generate(engine, prompts, NEW_TOKENS))
            speeds.setdefault(f"decode, batch {batch}", {}).setdefault(name, []).append(found)
        begun_s = time.perf_counter()
        [[first_s]] = await generate(engine, [random_prompt(PREFILL_TOKENS, seed=number)], 1)
        found = PREFILL_TOKENS / (first_s - begun_s)
        speeds.setdefault(f"prefill, {PREFILL_TOKENS} tokens", {}).setdefault(name, []).append(found)

    async with AsyncExitStack() as stack:
        engines = {
            name: await stack.enter_async_context(started(name, default_model(), chunk_tokens=CHUNK_TOKENS))
            for name in NAMES
        }
        for number in range(ROUNDS + 1):
            for name, engine in engines.items():
                await turn(name, engine, number)
    # The first turn warms up.
    return {
        what: {name: statistics.median(found[1:]) for name, found in by_engine.items()}
        for what, by_engine in speeds.items()
    }


def measure() -> dict[str, dict[str, float]]:
    """Tokens a second, by what and by engine. Takes about two minutes."""
    return asyncio.run(_measure())
