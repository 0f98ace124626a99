"""One prefill and one decode engine, shared by all tests: each is three processes and takes half a minute to start."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

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
