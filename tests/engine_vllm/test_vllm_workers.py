"""Prefill and decode services on vLLM, over two real pools: what is lost or damaged on the way is computed again."""

import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from halfmoon.engine.contract import Engine
from halfmoon.pool.arena import aligned
from halfmoon.prefill.state import HalfState
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.requests import FinishReason, Sampling
from halfmoon.schemas.splits import DecodeHalf, PrefillHalf, Role
from support.engines import CHUNK_TOKENS
from support.model import small_model
from support.pool_nodes import Node
from support.prompts import random_tokens
from support.reference import greedy
from support.vllm import Pair, root_of
from support.wait import until
from support.workers import Cluster, Reader, cluster

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

PROMPT = random_tokens(3 * CHUNK_TOKENS + 9, seed=700)
NUM_LOADABLE = len(PROMPT) - 1
MAX_TOKENS = 6
_numbers = itertools.count()


class Borrowed:
    """An engine whose start and stop are somebody else's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        for name in ("open", "hot", "hot_changes", "forget", "load", "prefill", "decode", "close", "stats"):
            setattr(self, name, getattr(engine, name))

    @property
    def card(self) -> ModelCard:
        return self._engine.card

    async def start(self, progress: Callable[[float], None] = lambda done: None) -> ModelCard:
        return self._engine.card

    async def stop(self) -> None:
        """The service has closed its sequences."""


@dataclasses.dataclass
class Served:
    cluster: Cluster
    root: bytes

    def halves(self) -> tuple[PrefillHalf, DecodeHalf]:
        sampling = Sampling(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        prefill, decode = self.cluster.halves(PROMPT, sampling=sampling)
        model = self.cluster.prefill.heartbeat().card
        assert model is not None
        own = {"model": model.name, "root": self.root}
        return msgspec.structs.replace(prefill, **own), msgspec.structs.replace(decode, **own)

    async def prefilled(self) -> tuple[DecodeHalf, Reader]:
        """All KV is there, and held for a decode half that wasn't sent yet."""
        prefill, decode = self.halves()
        reader = await self.cluster.listen(decode.reply)
        await self.cluster.send_prefill(prefill)
        runs = self.cluster.prefill._runs
        await until(lambda: [run.state for run in runs.values()] == [HalfState.HANDING_OVER], 60, what="handing over")
        return decode, reader

    async def right(self, reader: Reader, expected: list[int], *, num_reused: int) -> None:
        terminal = await reader.terminal(60)
        assert reader.tokens == expected
        assert getattr(terminal, "finish_reason", terminal) is FinishReason.LENGTH
        await self.cluster.idle()
        assert len(reader.terminals) == 1
        assert self.cluster.ended_of(Role.DECODE)[-1].num_reused_tokens == num_reused


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return greedy(small_model(), [PROMPT], MAX_TOKENS)[0]


@pytest_asyncio.fixture(loop_scope="session")
async def served(pair: Pair, tmp_path: Path) -> AsyncIterator[Served]:
    slot_bytes = aligned(pair.prefill.card.payload_bytes(CHUNK_TOKENS))
    async with cluster(
        tmp_path,
        pool_settings={"slot_bytes": slot_bytes, "arena_bytes": 10 * slot_bytes, "shm_dir": tmp_path},
        prefill_settings={"model": small_model()},
        decode_settings={"model": small_model()},
        prefill_engine=Borrowed(pair.prefill),  # type: ignore[arg-type]
        decode_engine=Borrowed(pair.decode),  # type: ignore[arg-type]
    ) as running:
        yield Served(running, root_of(f"served {next(_numbers)}"))
        assert running.failures == []


def damage(node: Node, index: int) -> None:
    """Flip a byte of the chunk with this index."""
    slots = node.service.store.ledger.slots
    slot = next(slot for slot in (slots[n] for n in range(len(slots))) if slot.meta and slot.meta.index == index)
    node.client.arena.slot(slot.number)[3] ^= 0xFF


async def test_a_prompt_is_handed_over_and_then_hot(served: Served, expected: list[int]) -> None:
    decode, reader = await served.prefilled()
    await served.cluster.send_decode(decode)
    await served.right(reader, expected, num_reused=NUM_LOADABLE)
    assert served.cluster.outcomes("prefill") == ["computed"] * 4
    num_loaded = len(served.cluster.chunk_spans("decode"))
    assert num_loaded == 4
    prefill, decode = served.halves()
    reader = await served.cluster.listen(decode.reply)
    await served.cluster.send_decode(decode)
    await served.cluster.send_prefill(prefill)
    await served.right(reader, expected, num_reused=NUM_LOADABLE)


@pytest.mark.parametrize("index", [0, 2, 3])
async def test_a_damaged_chunk_is_computed_again(served: Served, expected: list[int], index: int) -> None:
    decode, reader = await served.prefilled()
    damage(served.cluster.node_a, index)
    await served.cluster.send_decode(decode)
    await served.right(reader, expected, num_reused=index * CHUNK_TOKENS)
    assert "corrupt" in served.cluster.outcomes("decode")


async def test_expired_leases_are_misses(served: Served, expected: list[int]) -> None:
    """Prefill's kv-tier forgets the lease: the partial chunk is gone, those that are registered stay."""
    decode, reader = await served.prefilled()
    assert served.cluster.node_a.service.store.ledger.expire(time.time_ns() + 10**15)
    await served.cluster.send_decode(decode)
    await served.right(reader, expected, num_reused=3 * CHUNK_TOKENS)


async def test_a_cancelled_request_leaves_nothing(served: Served) -> None:
    decode, reader = await served.prefilled()
    await served.cluster.send_decode(decode)
    await served.cluster.cancel(decode.request_id)
    await reader.terminal(60)
    await served.cluster.idle()
