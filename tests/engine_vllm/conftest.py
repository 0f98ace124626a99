"""One prefill and one decode engine, shared by all tests: each is three processes and takes half a minute to start."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from halfmoon.engine.contract import DecodeSpec, Engine, EngineError, SequenceClosed, SequenceSpec
from halfmoon.schemas.requests import Sampling
from support.engines import CHUNK_TOKENS, started
from support.model import small_model
from support.slots import Slots
from support.vllm import Pair

KV_TOKENS = 1536
NUM_SLOTS = 48


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_pair() -> AsyncIterator[Pair]:
    """Prefill's steps are a chunk long; decode's end amid chunks, and it claims little, so that it has to preempt."""
    async with AsyncExitStack() as stack:
        prefill, decode = await asyncio.gather(
            stack.enter_async_context(started("vllm", small_model(), kv_tokens=KV_TOKENS)),
            stack.enter_async_context(
                started("vllm", small_model(), kv_tokens=KV_TOKENS, step_tokens=96, completion_reserve_tokens=16)
            ),
        )
        yield Pair(prefill, decode)
        await stop_closes_everything(decode)


async def stop_closes_everything(engine: Engine) -> None:
    """Twice at once, amid a generation."""
    spec = DecodeSpec(Sampling(temperature=0.0, max_tokens=1000), seed=0)
    engine.open(SequenceSpec("running", [5, 6, 7], 1003, decode=spec))
    running = engine.decode("running", 0)
    assert (await anext(running)).position == 0
    await asyncio.gather(engine.stop(), engine.stop())
    with pytest.raises(SequenceClosed):
        async for _ in running:
            pass
    with pytest.raises(EngineError):
        engine.open(SequenceSpec("late", [5], 2))


@pytest_asyncio.fixture(loop_scope="session")
async def pair(shared_pair: Pair) -> AsyncIterator[Pair]:
    """Each test leaves the engines as it found them."""
    yield shared_pair
    for engine in (shared_pair.prefill, shared_pair.decode):
        stats = engine.stats()
        assert stats.free_tokens == stats.total_tokens
        assert stats.running == stats.waiting == 0


@pytest.fixture(scope="session")
def shared_slots(shared_pair: Pair) -> Iterator[Slots]:
    path = Path("/dev/shm") / f"halfmoon-test-{id(shared_pair)}"
    slots = Slots(path, shared_pair.prefill.card.payload_bytes(CHUNK_TOKENS), NUM_SLOTS)
    yield slots
    slots.close()


@pytest.fixture
def slots(shared_slots: Slots) -> Iterator[Slots]:
    """All of them free."""
    yield shared_slots
    shared_slots.reset()
