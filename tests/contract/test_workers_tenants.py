"""Quotas cost a tenant its cache, never an answer: whole requests over pools that give them little or no room."""

from pathlib import Path

import pytest

from halfmoon.kv_tier.quotas import TenantQuotas, TierQuota
from halfmoon.schemas.ids import TenantId
from support.exact_engine import CHUNK_TOKENS, reference
from support.pool_nodes import write_chunks
from support.workers import SEED, Cluster, cluster, prompt

TOKENS = prompt(3 * CHUNK_TOKENS + 5)
SLEEPER = TenantId("sleeper")
NUM_SLOTS = 8
ALL_RESERVED: dict[str, object] = {"tenants": {"sleeper": TenantQuotas(dram=TierQuota(reserve_share=1.0))}}
NOTHING_KEPT: dict[str, object] = {"tenants": {"*": TenantQuotas(dram=TierQuota(max_bytes=0))}}
ONE_KEPT: dict[str, object] = {"tenants": {"default": TenantQuotas(dram=TierQuota(max_share=1 / NUM_SLOTS))}}


async def answer(pair: Cluster) -> int:
    """Ask; the prompt's tokens that were cached. Fails where the answer isn't the right one."""
    reuse = [(pair.node_a.source,)] * 3
    _, _, reader = await pair.submit(TOKENS, reuse=reuse)
    finished = await reader.finished()
    assert reader.tokens == reference(TOKENS, 6, SEED)
    await pair.idle()
    return finished.usage.cached_tokens


@pytest.mark.parametrize("nodes", ["ab", "a", "b"])
async def test_where_all_is_reserved_for_another_a_request_is_served_without_the_pool(
    tmp_path: Path, nodes: str
) -> None:
    async with cluster(tmp_path, num_slots=NUM_SLOTS, pool_settings=ALL_RESERVED) as pair:
        theirs = [f"asleep {number}" for number in range(NUM_SLOTS)]
        full = [node for name, node in (("a", pair.node_a), ("b", pair.node_b)) if name in nodes]
        for node in full:
            await node.client.release(await write_chunks(node.client, *theirs, tenant=SLEEPER))
        for _ in range(2):
            await answer(pair)
        for node in full:
            counts = node.service.store.ledger.slots.counts()
            assert (counts.ready, counts.free) == (NUM_SLOTS, 0)
            assert node.service.store.counters.evictions == 0
        assert pair.failures == []


@pytest.mark.parametrize(("settings", "num_kept"), [(NOTHING_KEPT, 0), (ONE_KEPT, 1)])
async def test_what_is_beyond_a_quota_serves_its_request_and_is_gone(
    tmp_path: Path, settings: dict[str, object], num_kept: int
) -> None:
    async with cluster(tmp_path, num_slots=NUM_SLOTS, pool_settings=settings) as pair:
        assert await answer(pair) == 0
        counts = pair.node_a.service.store.ledger.slots.counts()
        assert (counts.ready, counts.free) == (num_kept, NUM_SLOTS - num_kept)
        [row] = pair.node_a.service.store.accounts.rows()
        assert (row.tenant, row.refused) == ("default", 3 - num_kept)
        assert await answer(pair) == num_kept * CHUNK_TOKENS
        assert pair.node_b.service.store.ledger.slots.num_registered <= num_kept
        assert pair.failures == []
