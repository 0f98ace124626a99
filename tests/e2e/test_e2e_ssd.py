"""A prompt whose KV survived on the SSD while its kv-tier was killed: served from there, with the reference's text."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmoon.bus.endpoint import call
from halfmoon.bus.errors import BusError
from halfmoon.bus.nats import NatsBus, NatsSettings
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import NodeId
from halfmoon.schemas.pool_stats import PoolStats, SsdStats, Stats
from support.outside import outside_client
from support.prompts import random_tokens
from support.reference import greedy
from support.system import System
from support.wait import until_awaited

pytestmark = [pytest.mark.timeout(240), pytest.mark.model, pytest.mark.nightly]

CHUNK_TOKENS = 64
MAX_TOKENS = 6
MODEL = "SmolLM2-135M-Instruct"
GREEDY = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
EAGER = {
    "HALFMOON_KV_TIER_SSD_ADMISSION": "all",
    "HALFMOON_KV_TIER_HIGH_WATERMARK": "0.001",
    "HALFMOON_KV_TIER_LOW_WATERMARK": "0",
}
"""Whatever nobody uses goes to the SSD at once."""


@pytest.fixture
def system(model: Path, tmp_path: Path) -> Iterator[System]:
    options = (f"--chunk-tokens={CHUNK_TOKENS}", "--threads=1", "--arena-mib=64", "--ssd-mib=256", "--nodes=1")
    system = System.start(tmp_path / "data", model, *options, environ=EAGER)
    yield system
    assert system.stop() == 0


async def test_a_prompt_from_the_ssd_has_the_right_text_after_a_kill(system: System, model: Path) -> None:
    prompt = random_tokens(3 * CHUNK_TOKENS + 7, 4711)
    [expected] = greedy(model, [prompt], MAX_TOKENS)
    bus = await NatsBus.connect(NatsSettings(url=system.nats_url, name="test"))

    async def pool() -> tuple[int, SsdStats] | None:
        """Chunks in DRAM, and the SSD."""
        try:
            stats = await call(bus, f"{subjects.kv_tier(NodeId('node-a'))}.stats", Stats(), PoolStats, timeout_s=2)
        except BusError:
            return None
        return None if stats.ssd is None else (stats.num_chunks, stats.ssd)

    async def all_on_the_ssd() -> bool:
        found = await pool()
        return found is not None and found[0] == 0 and found[1].num_chunks >= 3

    async with outside_client(system.nats_url, MODEL) as client:
        cold = await client.ask(tokens=prompt, sampling=GREEDY)
        assert (cold.tokens, cold.usage["cached_tokens"]) == (expected, 0)
        await until_awaited(all_on_the_ssd, 20, what="demoted")
        os.kill(system.pid("kv-tier-node-a"), signal.SIGKILL)

        async def is_another_life() -> bool:
            found = await pool()
            return found is not None and found[1].writes == 0 and found[1].num_chunks >= 3

        await until_awaited(is_another_life, 60, what="the kv-tier is back, with what it had")

        async def is_cached() -> bool:
            """The conductor knows of it a little later; right it is always."""
            again = await client.ask(tokens=prompt, sampling=GREEDY)
            assert again.tokens == expected
            return again.usage["cached_tokens"] == 3 * CHUNK_TOKENS

        await until_awaited(is_cached, 30, what="served from the cache")
    found = await pool()
    assert found is not None
    assert found[1].hits >= 3
    assert found[1].promotions == 0, "prefill and decode of one request are one use"
    await bus.close()
