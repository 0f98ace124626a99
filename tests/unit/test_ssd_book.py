"""Which chunks an SSD keeps, when DRAM gives chunks up to it, and when a failing disk is tried again. By hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.eviction import PolicyName, make_policy
from halfmoon.kv_tier.quotas import Quotas, TenantQuotas, TierBook, TierQuota
from halfmoon.kv_tier.ssd.book import SsdBook, in_order_of_use
from halfmoon.kv_tier.ssd.breaker import Breaker
from halfmoon.kv_tier.ssd.file import FileBody, file_bytes
from halfmoon.kv_tier.ssd.reuse import (
    Admission,
    Burst,
    Distances,
    Pressure,
    ReuseMemory,
    Watermarks,
    adapted,
)
from halfmoon.schemas.chunks import ChunkMeta, Tier
from halfmoon.schemas.ids import ChunkKey, RequestId, TenantId
from support.pool_nodes import key_of

S = 1_000_000_000
R1, R2, R3 = RequestId("r1"), RequestId("r2"), RequestId("r3")
CHUNK = file_bytes(1000)


def body(name: str, num_bytes: int = 1000, index: int = 0, used_ns: int = 0, tenant: str = "default") -> FileBody:
    meta = ChunkMeta(
        key=key_of(name),
        index=index,
        num_tokens=4,
        num_bytes=num_bytes,
        checksum=bytes(16),
        request_id=R1,
        created_ns=1,
        last_access_ns=used_ns,
        tenant=TenantId(tenant),
    )
    return FileBody(meta=meta)


def book(num_chunks: int, quotas: Quotas | None = None) -> SsdBook:
    limit_bytes = num_chunks * CHUNK
    tenants = TierBook(Tier.SSD, limit_bytes, quotas or {})
    return SsdBook(lambda: make_policy(PolicyName.LRU, num_chunks, ChunkKey), limit_bytes, tenants)


def names(keys: list[ChunkKey]) -> list[str]:
    by_key = {key_of(name): name for name in "abcdefgh"}
    return [by_key[key] for key in keys]


def test_a_full_book_names_the_longest_unused_and_never_those_kept() -> None:
    full = book(3)
    for name in "abc":
        chunk = full.add(body(name), 1)
        assert chunk is not None
        assert (chunk.meta.tier, chunk.num_bytes) == (Tier.SSD, CHUNK)
    assert full.victims(0) == []
    assert names(full.victims(CHUNK)) == ["a"]
    full.used([key_of("a")], 1, 2)
    assert names(full.victims(CHUNK)) == ["b"]
    full.is_kept = lambda meta: meta.key == key_of("b")
    assert names(full.victims(2 * CHUNK)) == ["c", "a"]
    assert names(full.victims(3 * CHUNK)) == ["c", "a"], "b stays, though room is missing"
    full.limit_bytes = CHUNK
    assert names(full.victims(0)) == ["c", "a"]
    full.check_integrity()


def test_a_tenant_at_its_quota_gives_up_its_own() -> None:
    some = book(
        6, {"small": TenantQuotas(ssd=TierQuota(max_bytes=2000)), "none": TenantQuotas(ssd=TierQuota(max_bytes=0))}
    )
    for at, name in enumerate("ab"):
        some.add(body(name, tenant="small"), at)
    some.add(body("c"), 2)
    assert names(some.own_victims(body("d", tenant="small").meta) or []) == ["a"]
    assert some.add(body("d", tenant="small"), 3) is None, "unless that has gone"
    assert some.own_victims(body("d").meta) == []
    assert some.own_victims(body("d", tenant="none").meta) is None
    assert some.remove(key_of("a"), evicted=True) is not None
    assert some.add(body("d", tenant="small"), 3) is not None
    some.check_integrity()


def test_what_lies_within_a_reserve_goes_for_nobody_else() -> None:
    some = book(4, {"kept": TenantQuotas(ssd=TierQuota(reserve_bytes=2000))})
    for at, (name, tenant) in enumerate([("a", "kept"), ("b", "kept"), ("c", "kept"), ("d", "noisy")]):
        some.add(body(name, tenant=tenant), at)
    noisy, kept = TenantId("noisy"), TenantId("kept")
    assert names(some.victims(CHUNK, noisy)) == ["a"], "the longest unused, above its tenant's reserve"
    assert names(some.victims(3 * CHUNK, noisy)) == ["a", "d"], "the rest is reserved"
    assert names(some.victims(CHUNK, kept)) == ["a"], "above its reserve, it is one among all"
    some.remove(key_of("a"), evicted=True)
    some.remove(key_of("b"), evicted=True)
    some.limit_bytes = 2 * CHUNK
    assert names(some.victims(CHUNK, kept)) == ["d"], "below its reserve, it takes the place of others first"
    some.check_integrity()


def test_a_chunk_given_up_while_it_is_written_never_counts() -> None:
    some = book(3)
    some.begin(body("a").meta)
    assert (some.num_bytes, some.num_bytes_coming) == (0, CHUNK)
    with pytest.raises(ValueError, match="has a file already"):
        some.begin(body("a").meta)
    assert some.remove(key_of("a"), evicted=False) is None
    assert some.finish(body("a"), 1) is None
    assert (len(some), some.num_bytes_coming) == (0, 0)
    some.begin(body("a").meta)
    assert some.finish(body("a"), 1) is not None
    with pytest.raises(ValueError, match="has a file already"):
        some.add(body("a"), 1)
    assert [meta.key for meta in some.metas()] == [key_of("a")]
    some.check_integrity()


def test_after_a_restart_the_book_goes_on_in_the_order_of_use() -> None:
    found = [body("b", index=1, used_ns=7), body("c", used_ns=9), body("a", index=0, used_ns=7)]
    assert [each.meta.key for each in in_order_of_use(found)] == [key_of("a"), key_of("b"), key_of("c")]


def test_demotion_begins_above_the_high_watermark_and_ends_at_the_low_one() -> None:
    marks, pressure = Watermarks(high=0.9, low=0.8), Pressure()
    excess = [pressure.num_excess(used, 100, marks) for used in (85, 90, 91, 85, 81, 80, 85, 90, 95)]
    assert excess == [0, 0, 11, 5, 1, 0, 0, 0, 15]


@given(st.lists(st.integers(0, 64), min_size=1), st.floats(0.1, 0.9), st.floats(0.01, 0.1))
def test_demotion_never_asks_for_more_than_brings_dram_to_the_low_watermark(
    in_use: list[int], low: float, gap: float
) -> None:
    pressure = Pressure()
    for used in in_use:
        excess = pressure.num_excess(used, 64, Watermarks(high=low + gap, low=low))
        assert 0 <= excess <= used
        assert not excess or low * 64 - 1 < used - excess <= low * 64


def test_distances_are_shared_out_by_bucket_and_old_ones_fade() -> None:
    distances = Distances()
    assert distances.share_between(0, 10**9) == 0.0
    for distance in [0, 0, 0, 100, 100, 1000]:
        distances.note(distance)
    assert distances.share_between(0, 50) == pytest.approx(0.5)
    assert distances.share_between(50, 500) == pytest.approx(1 / 3)
    assert distances.share_between(0, 10**6) == pytest.approx(1.0)
    for _ in range(50_000):
        distances.note(5)
    assert distances.share_between(50, 10**6) < 1e-3
    assert distances.total <= 8192


def memory_of(num_slots: int = 100, admission: Admission = Admission.AUTO) -> ReuseMemory:
    return ReuseMemory(num_slots, admission)


def test_a_use_is_one_by_another_request_and_counts_the_chunks_between() -> None:
    memory = memory_of()
    memory.came(key_of("a"), R1, is_new=True)
    memory.used(key_of("a"), R1)
    assert memory.num_uses(key_of("a")) == 0, "handed over to decode: the same request"
    for name in "bcd":
        memory.came(key_of(name), R1, is_new=True)
    memory.used(key_of("a"), R2)
    assert memory.num_uses(key_of("a")) == 1
    assert memory.distances.total == 1
    assert memory.distances.share_between(2.9, 4) == pytest.approx(1.0, abs=0.2)
    memory.came(key_of("a"), R3, is_new=True)
    assert memory.num_uses(key_of("a")) == 2, "computed again: it would have been used"
    memory.came(key_of("a"), R1, is_new=False)
    assert memory.num_uses(key_of("a")) == 2, "brought from elsewhere: that is no use"


def test_once_used_chunks_are_written_only_while_they_come_back() -> None:
    memory = memory_of()
    memory.came(key_of("a"), R1, is_new=True)
    assert not memory.is_worth_writing(key_of("a"))
    memory.used(key_of("a"), R2)
    assert memory.is_worth_writing(key_of("a"))
    for number in range(100):
        memory.came(key_of(f"x{number}"), R1, is_new=True)
        memory.given_up(key_of(f"x{number}"))
    assert not memory.is_worth_writing(key_of("x1"))
    for number in range(20):
        memory.used(key_of(f"x{number}"), R2)
    assert memory.share_returned == pytest.approx(20 / 132)
    assert memory.is_worth_writing(key_of("new")), "so many come back that a first use is evidence enough"


def test_settings_fix_the_admission() -> None:
    for admission, worth in ((Admission.ALL, True), (Admission.REUSED, False)):
        memory = memory_of(admission=admission)
        for number in range(100):
            memory.came(key_of(f"x{number}"), R1, is_new=True)
            memory.given_up(key_of(f"x{number}"))
            memory.used(key_of(f"x{number}"), R2)
        assert memory.is_worth_writing(key_of("never used")) == worth


def test_reach_follows_the_age_at_which_chunks_are_given_up() -> None:
    memory = memory_of(num_slots=10)
    assert memory.reach == 10
    for number in range(2000):
        memory.came(key_of(f"x{number}"), R1, is_new=True)
        if number >= 50:
            memory.given_up(key_of(f"x{number - 50}"))
    assert memory.reach == 50


def test_the_memory_is_bounded() -> None:
    memory = memory_of(num_slots=2000)
    for number in range(9000):
        memory.came(ChunkKey(number.to_bytes(32, "big")), R1, is_new=True)
    assert memory.num_uses(ChunkKey(bytes(32))) == 0
    memory.used(ChunkKey(bytes(32)), R2)
    assert memory.distances.total == 0, "forgotten"


def test_watermarks_leave_room_for_bursts_where_that_costs_no_reuse() -> None:
    memory = memory_of(num_slots=1000)
    assert adapted(memory, 1000, burst=0.0) == Watermarks(high=1 - 1 / 64, low=1 - 1 / 32)
    assert adapted(memory, 1000, burst=50.0) == Watermarks(high=0.95, low=0.9)
    assert adapted(memory, 1000, burst=1000.0) == Watermarks(high=0.875, low=0.75)
    for _ in range(100):
        memory.distances.note(10)
    for _ in range(5):
        memory.distances.note(900)
    assert memory.share_to_free() == 1 / 16, "reuses at 900 chunks would be lost to a pool with room for 875"
    assert adapted(memory, 1000, burst=1000.0).low == 1 - 1 / 16


def test_the_largest_burst_is_remembered_and_fades() -> None:
    burst = Burst(half_life=10)
    for free in (100, 90, 90, 95):
        burst.look(free)
    assert burst.num_slots == pytest.approx(10 * 0.5**0.2)
    for _ in range(100):
        burst.look(95)
    assert burst.num_slots < 0.1


def test_a_failing_disk_is_left_alone_twice_as_long_each_time() -> None:
    breaker = Breaker()
    assert not breaker.is_open(0)
    assert breaker.failed(0, "no space")
    assert breaker.is_open(0)
    assert not breaker.failed(S // 2, "another that had begun before")
    assert not breaker.succeeded(S // 2), "so had this one"
    assert (breaker.reason, breaker.num_failures) == ("no space", 1)
    assert not breaker.is_open(S)
    assert not breaker.failed(S, "still no space"), "it was broken already"
    assert breaker.is_open(3 * S - 1)
    assert not breaker.is_open(3 * S)
    assert breaker.is_broken
    assert breaker.succeeded(3 * S)
    assert (breaker.is_broken, breaker.reason) == (False, "")
    assert not breaker.succeeded(3 * S)


def test_one_bad_block_is_no_bad_disk() -> None:
    breaker = Breaker(tolerance=2)
    assert not breaker.failed(0, "EIO")
    assert not breaker.failed(0, "EIO")
    assert not breaker.is_open(0)
    assert not breaker.succeeded(0)
    assert [breaker.failed(0, "EIO") for _ in range(3)] == [False, False, True]
    assert breaker.is_open(S - 1)
    assert not breaker.is_open(S)
