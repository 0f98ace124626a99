"""The simulated engine's own time, which goes on whether its chunks and tokens are fetched or not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from halfmoon.engine.contract import ChunkSink, ChunkWritten, DecodeSpec, SequenceSpec
from halfmoon.engine.sim.engine import SimEngine, SimEngineConfig
from halfmoon.schemas.requests import Sampling
from support.beside import CONFIG
from support.tiny_tokenizer import byte_level
from support.wait import until

CHUNK_TOKENS = 64
CHUNK_S = 0.04
STEP_S = 0.1
READING_S = 0.02
"""Two clocks are read one after the other for a chunk's times; between them, a busy machine may do something else."""


@asynccontextmanager
async def engine(tmp_path: Path) -> AsyncIterator[SimEngine]:
    model = byte_level(tmp_path / "tiny")
    (model / "config.json").write_bytes(msgspec.json.encode(CONFIG))
    config = SimEngineConfig(
        model=model,
        name="tiny",
        chunk_tokens=CHUNK_TOKENS,
        prefill_tokens_per_s=CHUNK_TOKENS / CHUNK_S,
        decode_step_s=STEP_S,
    )
    started = SimEngine(config)
    await started.start()
    try:
        yield started
    finally:
        await started.stop()


async def computed(engine: SimEngine, name: str, num_chunks: int, dawdle_s: float) -> list[ChunkWritten]:
    num_tokens = num_chunks * CHUNK_TOKENS
    engine.open(SequenceSpec(name, [5] * num_tokens, num_tokens, has_sinks=True))
    num_bytes = engine.card.payload_bytes(CHUNK_TOKENS)
    sinks = [ChunkSink(index, CHUNK_TOKENS, memoryview(bytearray(num_bytes))) for index in range(num_chunks)]
    found = []
    async for each in engine.prefill(name, 0, num_tokens, sinks):
        found.append(each)
        await asyncio.sleep(dawdle_s)
    await engine.close(name)
    return found


async def test_chunks_follow_on_each_other_however_late_they_are_fetched(tmp_path: Path) -> None:
    async with engine(tmp_path) as sim:
        one, other = await asyncio.gather(computed(sim, "a", 3, 0.03), computed(sim, "b", 3, 0.03))
    first, second = sorted((one, other), key=lambda chunks: chunks[0].started_ns)
    chunks = [*first, *second]
    for before, after in pairwise(chunks):
        assert (after.started_ns - before.finished_ns) / 1e9 == pytest.approx(0.0, abs=READING_S)
    for chunk in chunks:
        assert (chunk.finished_ns - chunk.started_ns) / 1e9 == pytest.approx(CHUNK_S, abs=READING_S)


async def test_a_prompt_that_is_given_up_makes_way_at_once(tmp_path: Path) -> None:
    async with engine(tmp_path) as sim:
        given_up = asyncio.create_task(computed(sim, "a", 64, 0.0))
        await until(lambda: sim.stats().running)
        after = asyncio.create_task(computed(sim, "b", 1, 0.0))
        await asyncio.sleep(CHUNK_S / 2)
        await sim.close("a")
        (chunk,) = await after
        assert (chunk.finished_ns - chunk.started_ns) / 1e9 == pytest.approx(CHUNK_S, abs=READING_S)
        with pytest.raises(Exception, match="closed"):
            await given_up


async def test_steps_are_shared_and_a_late_fetch_misses_none(tmp_path: Path) -> None:
    """One begins; another comes within its step, and has its first token when the next step ends."""
    loop = asyncio.get_running_loop()
    sampling = DecodeSpec(Sampling(temperature=0.0, max_tokens=6, ignore_eos=True), seed=1)

    async with engine(tmp_path) as sim:

        async def decoded(name: str, dawdle_s: float) -> list[float]:
            sim.open(SequenceSpec(name, [7] * 8, 20, decode=sampling))
            times = []
            async for _ in sim.decode(name, 7):
                times.append(loop.time())
                await asyncio.sleep(dawdle_s)
            await sim.close(name)
            return times

        began_s = loop.time()
        late = asyncio.create_task(decoded("a", 1.5 * STEP_S))
        await asyncio.sleep(STEP_S / 2)
        joined = await decoded("b", 0.0)
        await late
    # Never before their time: the steps are a's, from its begin on.
    assert all(at_s >= began_s + (2 + number) * STEP_S - 0.001 for number, at_s in enumerate(joined))
    assert joined == sorted(joined)
