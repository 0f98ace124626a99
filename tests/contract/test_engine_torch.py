"""What is the torch engine's own: scattered blocks, progress, speeds, and what a failed step leaves."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from halfmoon.engine.contract import DecodeSpec, Engine, EngineError, SequenceSpec
from halfmoon.engine.factory import EngineSettings, build_engine
from halfmoon.schemas.requests import Sampling
from support.engines import generated, prefilled, sinks_for, started, token_ids
from support.tiny_models import tiny_model
from support.wait import until

CHUNK_TOKENS = 8
KV_TOKENS = 512
BLOCK_TOKENS = 16
PROMPT = [3 + (7 * place) % 120 for place in range(150)]
GREEDY = Sampling(temperature=0.0, max_tokens=5)


async def exhaust(iterator: AsyncIterator[object]) -> None:
    async for _ in iterator:
        pass


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    async with started(
        "torch", tiny_model(tmp_path, "llama"), chunk_tokens=CHUNK_TOKENS, kv_tokens=KV_TOKENS
    ) as engine:
        yield engine


async def test_scattered_blocks_hold_a_sequence_as_consecutive_ones_do(engine: Engine) -> None:
    alone = token_ids(await generated(engine, PROMPT, GREEDY))
    chunks = await prefilled(engine, PROMPT)
    blocks = [f"block {number}" for number in range(KV_TOKENS // BLOCK_TOKENS)]
    for block in blocks:
        engine.open(SequenceSpec(block, [5], BLOCK_TOKENS))
    assert engine.stats().free_tokens == 0
    for block in blocks[::2]:
        await engine.close(block)
    assert token_ids(await generated(engine, PROMPT, GREEDY)) == alone
    assert token_ids(await generated(engine, PROMPT, GREEDY, loaded=chunks)) == alone
    assert [chunk.payload for chunk in await prefilled(engine, PROMPT, loaded=chunks[:3])][:3] == [
        chunk.payload for chunk in chunks[:3]
    ]
    for block in blocks[1::2]:
        await engine.close(block)
    assert engine.stats().free_tokens == KV_TOKENS


async def test_progress_grows_to_the_end(tmp_path: Path) -> None:
    settings = EngineSettings(
        model=tiny_model(tmp_path, "llama"), name="tested", chunk_tokens=8, device="cpu", threads=1, kv_tokens=256
    )
    engine, seen = build_engine("torch", settings), list[float]()
    try:
        card = await engine.start(seen.append)
        await until(lambda: seen[-1:] == [1.0])
        assert seen == sorted(seen)
        assert all(0 < done <= 1 for done in seen)
        assert engine.card == card
    finally:
        await engine.stop()


async def test_speeds_are_told_once_there_are_some(engine: Engine) -> None:
    assert engine.stats().prefill_tokens_per_s is engine.stats().decode_step_s is None
    await generated(engine, PROMPT, GREEDY)
    stats = engine.stats()
    assert stats.steps >= 5
    assert stats.prefill_tokens_per_s is not None
    assert stats.prefill_tokens_per_s > 0
    assert stats.decode_step_s is not None
    assert stats.decode_step_s > 0


async def test_a_failed_step_is_told_to_all_and_leaves_nothing_behind(engine: Engine) -> None:
    """A sink whose memory is gone, against the contract, stands for whatever can fail in a step."""
    spec = DecodeSpec(Sampling(temperature=0.0, max_tokens=150), seed=0)
    engine.open(SequenceSpec("other", [5, 6], 200, decode=spec))
    other = engine.decode("other", 0)
    assert await anext(other)
    sinks = sinks_for(engine, 0, len(PROMPT))
    engine.open(SequenceSpec("broken", PROMPT, len(PROMPT)))
    broken = engine.prefill("broken", 0, len(PROMPT), sinks)
    begun = asyncio.create_task(exhaust(broken))
    await asyncio.sleep(0)
    sinks[-1].payload.release()
    with pytest.raises(EngineError, match="a step of the engine failed: ValueError"):
        await begun
    with pytest.raises(EngineError, match="a step of the engine failed"):
        await exhaust(other)
    with pytest.raises(EngineError, match="the engine has failed"):
        engine.open(SequenceSpec("later", [5], 10))
    await engine.close("broken")
    await engine.close("other")
    assert engine.stats().free_tokens == KV_TOKENS
    assert engine.stats().running == 0
