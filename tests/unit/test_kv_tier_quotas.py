"""Quotas as they are set, the books that keep them, and accounts that stay bounded."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from halfmoon.config import ConfigError, load_config
from halfmoon.kv_tier.accounts import Accounts
from halfmoon.kv_tier.config import KvTierConfig
from halfmoon.kv_tier.quotas import TenantQuotas, TierBook, TierQuota
from halfmoon.schemas.chunks import ChunkMeta, ChunkOutcome, Tier
from halfmoon.schemas.ids import ChunkKey, ModelName, RequestId, TenantId, WorkerId
from halfmoon.schemas.kv_tier import Acquire, AcquiredChunk, SlotRef, WantedChunk
from halfmoon.tracing.tenants import OTHER, TenantCounts

ACME, BETA = TenantId("acme"), TenantId("beta")
MODEL = ModelName("m")


def configured(tenants: str) -> KvTierConfig:
    return load_config(
        KvTierConfig, "kv_tier", {"HALFMOON_KV_TIER_TENANTS": tenants, "HALFMOON_KV_TIER_ARENA_BYTES": "1000000"}
    )


def meta_of(tenant: TenantId, num_bytes: int = 10) -> ChunkMeta:
    return ChunkMeta(
        key=ChunkKey(bytes(32)),
        index=0,
        num_tokens=4,
        num_bytes=num_bytes,
        checksum=b"",
        request_id=RequestId("r"),
        created_ns=1,
        model=MODEL,
        tenant=tenant,
    )


def test_quotas_are_read_from_json() -> None:
    config = configured(
        '{"acme": {"dram": {"max_share": 0.5, "reserve_share": 0.2}, "ssd": {"max_bytes": 7}}, "*": {}}'
    )
    assert config.tenants["acme"] == TenantQuotas(
        dram=TierQuota(max_share=0.5, reserve_share=0.2), ssd=TierQuota(max_bytes=7)
    )
    assert config.tenants["*"] == TenantQuotas()


@pytest.mark.parametrize(
    ("tenants", "said"),
    [
        ('{"acme": {"dram": {"max_shares": 0.5}}}', "max_shares"),
        ('{"acme": {"hbm": {}}}', "hbm"),
        ('{"acme": {"dram": {"max_share": 1.5}}}', "<= 1"),
        ('{"acme": {"dram": {"max_bytes": -1}}}', ">= 0"),
        ('{"a": {"dram": {"reserve_share": 0.6}}, "b": {"dram": {"reserve_share": 0.5}}}', "add up to 1,100,000 bytes"),
        ('{"a": {"dram": {"reserve_bytes": 1000001}}}', "add up to 1,000,001 bytes of 1,000,000"),
        ('{"*": {"dram": {"reserve_share": 0.1}}}', "reserve for named ones only"),
        ('{"acme": {"dram": {"max_share": 0.1, "reserve_share": 0.2}}}', "could never be filled"),
        ('{"": {}}', "name is empty"),
        ("half of it", "object"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_reason(tenants: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"tenants|TENANTS") as caught:
        configured(tenants)
    assert said in str(caught.value)


def test_where_both_are_set_the_smaller_maximum_and_the_larger_reserve_count() -> None:
    quota = TierQuota(max_bytes=600, max_share=0.5, reserve_bytes=100, reserve_share=0.2)
    assert (quota.most(1000), quota.reserve(1000)) == (500, 200)
    assert (quota.most(10_000), quota.reserve(400)) == (600, 100)
    assert TierQuota().most(1000) is None


def test_a_tier_of_files_counts_their_own_bytes() -> None:
    quotas = {"acme": TenantQuotas(ssd=TierQuota(max_bytes=100, reserve_bytes=40))}
    book = TierBook(Tier.SSD, 1000, quotas)
    assert book.admit(meta_of(ACME, 70))
    assert not book.admit(meta_of(ACME, 31))
    assert book.admit(meta_of(ACME, 30))
    assert (book.used_bytes(ACME), book.spare_bytes(ACME)) == (100, 60)
    book.discharge(meta_of(ACME, 70))
    assert (book.used_bytes(ACME), book.spare_bytes(ACME)) == (30, 0)
    assert (book.num_excess(ACME, 9, 10), book.num_reserved(ACME, 9, 10)) == (2, 1)
    assert book.admit(meta_of(BETA, 900))
    book.check([meta_of(ACME, 30), meta_of(BETA, 900)])
    with pytest.raises(AssertionError):
        book.check([meta_of(BETA, 900)])


def acquire(tenant: str, *is_hit: bool) -> tuple[Acquire, list[AcquiredChunk]]:
    key = ChunkKey(bytes(32))
    wanted = tuple(WantedChunk(key=key, index=index, num_tokens=4, num_bytes=10) for index in range(len(is_hit)))
    request = Acquire(
        request_id=RequestId("r"),
        holder=WorkerId("w"),
        chunks=wanted,
        lease_s=1.0,
        tenant=TenantId(tenant),
        model=MODEL,
    )
    slot = SlotRef(slot=0, generation=1, num_bytes=10)
    chunks = [
        AcquiredChunk(key=key, index=index, outcome=ChunkOutcome.HIT_LOCAL, slot=slot if hit else None)
        for index, hit in enumerate(is_hit)
    ]
    return request, chunks


def test_accounts_by_tenant_and_model_as_rows_and_for_prometheus() -> None:
    dram = TierBook(Tier.DRAM, 1000, {}, chunk_bytes=16)
    ssd = TierBook(Tier.SSD, 1000, {})
    accounts = Accounts(dram, ssd)
    accounts.asked(*acquire("acme", True, True, False))
    accounts.evicted(meta_of(BETA))
    for book in (dram, dram, ssd):
        assert book.admit(meta_of(ACME))
    acme, beta = accounts.rows()
    assert (acme.tenant, acme.model, acme.hits, acme.misses, acme.hit_tokens, acme.evictions) == (
        "acme", "m", 2, 1, 8, 0,
    )  # fmt: skip
    assert (acme.num_chunks, acme.num_bytes) == ({"dram": 2, "ssd": 1}, {"dram": 32, "ssd": 10})
    assert (beta.tenant, beta.evictions, beta.num_chunks) == ("beta", 1, {})
    registry = CollectorRegistry()
    for collector in accounts.collectors():
        registry.register(collector)
    text = generate_latest(registry).decode()
    assert 'halfmoon_kvtier_tenant_held_bytes{model="m",tenant="acme",tier="dram"} 32.0' in text
    assert 'halfmoon_kvtier_tenant_chunks_total{kind="hit",model="m",tenant="acme"} 2.0' in text
    assert 'halfmoon_kvtier_tenant_chunks_total{kind="evicted",model="m",tenant="beta"} 1.0' in text
    assert 'halfmoon_kvtier_tenant_tokens_total{kind="miss",model="m",tenant="acme"} 4.0' in text


def test_what_small_tenants_hold_is_shown_together() -> None:
    book = TierBook(Tier.DRAM, 10**6, {}, chunk_bytes=1)
    for number in range(100):
        for _ in range(number + 1):
            assert book.admit(meta_of(TenantId(f"t{number}")))
    held = Accounts(book).held()
    assert len(held) == 33
    assert held[TenantId("t99"), MODEL, Tier.DRAM].num_bytes == 100
    assert held[TenantId(OTHER), MODEL, Tier.DRAM].num_bytes == sum(range(1, 69))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 50)), max_size=300))
@settings(max_examples=100, deadline=None)
def test_counts_stay_bounded_never_fall_and_add_up(adds: list[tuple[int, int]]) -> None:
    counts = TenantCounts(max_named=4)
    total = 0
    other = 0
    before: dict[str, int] = {}
    for number, amount in adds:
        counts.add(f"t{number}", "m", {"tokens": amount})
        total += amount
        sums = {tenant: value for (tenant, _, _), value in counts.sums().items()}
        assert sum(sums.values()) == total
        assert len(sums) <= 5
        assert sums.get(OTHER, 0) >= other
        assert all(sums[tenant] >= before[tenant] for tenant in sums.keys() & before.keys())
        other, before = sums.get(OTHER, 0), sums


def test_a_tenant_that_grows_big_gets_a_name_of_its_own() -> None:
    counts = TenantCounts(max_named=2)
    for tenant in ("small", "middling", *(f"t{number}" for number in range(100))):
        counts.add(tenant, "m", {"tokens": 10})
    for _ in range(5):
        counts.add("big", "m", {"tokens": 10})
    sums = Counter(counts.sums())
    assert sums["big", "m", "tokens"] == 30
    assert sum(sums.values()) == 1070
    assert len(sums) == 3
