"""The pair of tenants once more, where all that is cached lies on the SSD: one finds its own there, another doesn't."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmoon.schemas.chunks import ChunkOutcome
from support.halves import Halves, halves
from support.prompts import random_tokens
from support.system import System
from support.wait import until_awaited

pytestmark = pytest.mark.timeout(300)

CHUNK_TOKENS = 64
EVERYTHING_GOES_DOWN = {
    "HALFMOON_KV_TIER_SSD_ADMISSION": "all",
    "HALFMOON_KV_TIER_HIGH_WATERMARK": "0.000001",
    "HALFMOON_KV_TIER_LOW_WATERMARK": "0",
}


@pytest.fixture
def system(model: Path, tmp_path: Path) -> Iterator[System]:
    system = System.start(
        tmp_path / "data",
        model,
        *("--engine=sim", "--arena-mib=16", f"--chunk-tokens={CHUNK_TOKENS}", "--ssd-mib=16"),
        environ=EVERYTHING_GOES_DOWN,
    )
    yield system
    assert system.stop() == 0


async def lies_on_ssd(driver: Halves, num_chunks: int) -> None:
    async def is_down() -> bool:
        pool = await driver.pool("node-a")
        assert pool.ssd is not None
        return pool.ssd.num_chunks >= num_chunks and pool.free == pool.total

    await until_awaited(is_down, 20, what="everything is on the SSD")


async def test_from_the_ssd_the_same_tenant_hits_and_another_misses(system: System) -> None:
    prompt = random_tokens(2 * CHUNK_TOKENS + 1, 21)
    async with halves(system.nats_url) as driver:
        before = await driver.pool("node-a")
        assert before.ssd is not None
        num_before = before.ssd.num_chunks
        cold = await driver.send(prompt, prefill="prefill-1", decode="decode-1", tenant="alpha")
        await lies_on_ssd(driver, num_before + 2)
        reuse = ["node-a"] * 2
        same = await driver.send(prompt, prefill="prefill-1", decode="decode-1", tenant="alpha", reuse=reuse)
        other = await driver.send(prompt, prefill="prefill-1", decode="decode-1", tenant="beta", reuse=reuse)
        await lies_on_ssd(driver, num_before + 4)
        use = {str(row.tenant): row for row in (await driver.pool("node-a")).tenants}
    assert [chunk.outcome for chunk in same.ready.values()] == [ChunkOutcome.SSD] * 2
    assert [chunk.outcome for chunk in other.ready.values()] == [ChunkOutcome.COMPUTED] * 2
    assert cold.tokens == same.tokens == other.tokens
    assert use["alpha"].num_chunks == use["beta"].num_chunks == {"ssd": 2}
    assert (use["alpha"].evictions, use["beta"].evictions) == (0, 0)
