"""What a selection means, how orders are kept few, what is stale, and what a cache of blocks forgets: pure parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.chunks.selection import Selected, coalesce, includes
from halfmoon.engine.vllm.cache_events import HotChunks
from halfmoon.kv_tier.flushes import FlushBook, flushed_by
from halfmoon.registry.orders import OrderBook, TooManyPins
from halfmoon.schemas.chunks import ChunkMeta
from halfmoon.schemas.ids import ChunkKey, ModelName, RequestId, TenantId
from halfmoon.schemas.orders import FlushOrder, PinOrder, Selection
from halfmoon.worker.makers import Makers

TENANTS = [TenantId("acme"), TenantId("other")]
MODELS = [ModelName("m1"), ModelName("m2")]
REQUEST = RequestId("req-1")


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "big"))


def meta(number: int, parent: int | None = None, *, index: int = 0, created_ns: int = 1, tenant: int = 0) -> ChunkMeta:
    return ChunkMeta(
        key=key(number),
        index=index,
        num_tokens=1,
        num_bytes=1,
        checksum=b"",
        request_id=REQUEST,
        created_ns=created_ns,
        parent=None if parent is None else key(parent),
        tenant=TENANTS[tenant],
        model=MODELS[number % 2],
    )


@st.composite
def forests(draw: st.DrawFn) -> dict[ChunkKey, ChunkMeta]:
    """Prompts that share prefixes, as a pool may hold them: chunks of any of them may be missing."""
    metas: list[ChunkMeta] = []
    for number in range(draw(st.integers(1, 12))):
        above = draw(st.sampled_from([None, *metas]))
        metas.append(
            meta(
                number,
                None if above is None else int.from_bytes(above.key, "big"),
                index=0 if above is None else above.index + 1,
                created_ns=draw(st.integers(1, 20)),
                tenant=draw(st.integers(0, 1)),
            )
        )
    return {each.key: each for each in metas}


selections = st.builds(
    Selection,
    tenant=st.sampled_from([None, *TENANTS]),
    model=st.sampled_from([None, *MODELS]),
    keys=st.lists(st.integers(0, 12).map(key), max_size=2).map(tuple),
    prefixes=st.lists(st.integers(0, 12).map(key), max_size=2).map(tuple),
    everything=st.booleans(),
)


@given(forests(), selections, st.data())
def test_a_selection_means_a_prefix_and_all_behind_it_and_what_can_not_be_told(
    whole: dict[ChunkKey, ChunkMeta], selection: Selection, data: st.DataObject
) -> None:
    missing = data.draw(st.sets(st.sampled_from(sorted(whole))))
    held = {each: value for each, value in whole.items() if each not in missing}
    selected = Selected(selection, held.get)
    for each in data.draw(st.permutations(list(held.values()))):
        line = [each]
        while (parent := line[-1].parent) is not None and parent in held:
            line.append(held[parent])
        ends_in = line[-1].parent
        behind = any(one.key in selection.prefixes for one in line) or bool(ends_in and selection.prefixes)
        named = not (selection.keys or selection.prefixes) or each.key in selection.keys or behind
        meant = not selection.is_empty and named
        meant = meant and selection.tenant in (None, each.tenant) and selection.model in (None, each.model)
        assert (each in selected) == meant
        truly_behind = False
        above: ChunkMeta | None = each
        while above is not None:
            truly_behind = truly_behind or above.key in selection.prefixes
            above = None if above.parent is None else whole[above.parent]
        if truly_behind and selection.tenant in (None, each.tenant) and selection.model in (None, each.model):
            assert each in selected, "nothing that follows a prefix stays behind"


@given(selections, selections, forests())
def test_what_includes_another_selects_all_of_it(
    wide: Selection, narrow: Selection, held: dict[ChunkKey, ChunkMeta]
) -> None:
    if includes(wide, narrow):
        inside, outside = Selected(narrow, held.get), Selected(wide, held.get)
        assert all(each in outside for each in held.values() if each in inside)


@given(st.lists(st.tuples(selections, st.integers(1, 20)), max_size=12), st.integers(1, 6), forests())
def test_fewer_orders_flush_no_less(
    given: list[tuple[Selection, int]], limit: int, held: dict[ChunkKey, ChunkMeta]
) -> None:
    orders = [
        FlushOrder(seq=seq, before_ns=before_ns, selection=selection)
        for seq, (selection, before_ns) in enumerate(given, start=1)
    ]
    kept = coalesce(orders, limit)
    assert len(kept) <= limit
    assert [order.seq for order in kept] == sorted({order.seq for order in kept})
    for after in range(len(orders) + 1):
        missed = [order for order in orders if order.seq > after]
        told = [order for order in kept if order.seq > after]
        for order in missed:
            if not order.selection.is_empty:
                for each in flushed_by(order, list(held.values()), is_late=True):
                    assert any(each in flushed_by(later, list(held.values()), is_late=True) for later in told)


def test_a_late_flush_leaves_what_was_computed_since_unless_it_rests_on_older_chunks() -> None:
    order = FlushOrder(seq=1, before_ns=10, selection=Selection(tenant=TENANTS[0]))
    metas = [
        meta(1, created_ns=5),
        meta(2, 1, index=1, created_ns=15),
        meta(3, created_ns=15),
        meta(4, 3, index=1, created_ns=16),
        meta(5, created_ns=5, tenant=1),
    ]
    assert flushed_by(order, metas, is_late=True) == {key(1), key(2)}
    assert flushed_by(order, metas, is_late=False) == {key(1), key(2), key(3), key(4)}


def test_what_a_flush_forbids_is_forgotten_about_no_request_but_those_at_work() -> None:
    book = FlushBook()
    book.carried_out(FlushOrder(seq=1, before_ns=10, selection=Selection(tenant=TENANTS[0])), [REQUEST])
    nowhere: dict[ChunkKey, ChunkMeta] = {}
    late, new = RequestId("late"), meta(1, created_ns=20)
    assert book.is_stale(meta(1, created_ns=9), late, nowhere.get)
    assert book.is_stale(new, REQUEST, nowhere.get)
    assert not book.is_stale(new, late, nowhere.get)
    assert not book.is_stale(meta(1, created_ns=9, tenant=1), REQUEST, nowhere.get)


def test_orders_are_numbered_without_gaps_from_the_clock_on_and_flushes_end_pins() -> None:
    book, now_ns = OrderBook(), 1_700_000_000_000_000_000
    chain = [PinOrder(key=key(1), tenant=TENANTS[0]), PinOrder(key=key(2), parent=key(1), tenant=TENANTS[0])]
    change = book.plan_pins([*chain, PinOrder(key=key(9))], now_ns, 3)
    book.apply(change)
    assert change.seq == now_ns // 1_000_000
    assert book.plan_pins(chain, now_ns, 3).seq == book.seq, "nothing changes"
    with pytest.raises(TooManyPins, match="4 chunks would be pinned, and at most 3"):
        book.plan_pins([PinOrder(key=key(10))], now_ns, 3)
    order, change = book.plan_flush(Selection(prefixes=(key(1),)), now_ns, 60.0)
    assert (order.seq, set(change.drop_pins)) == (book.seq + 1, {key(1), key(2)})
    book.apply(change)
    assert set(book.pins) == {key(9)}
    again, change = book.plan_flush(Selection(everything=True), now_ns + 5, 60.0)
    book.apply(change)
    assert (list(book.flushes), book.pins) == ([again.seq], {})
    _, change = book.plan_flush(Selection(tenant=TENANTS[1]), now_ns + 100 * 10**9, 60.0)
    book.apply(change)
    assert [each.is_merged for each in book.flushes_after(0)] == [False, False], "it flushed everything as it was"


def test_a_cache_of_blocks_forgets_by_other_salts() -> None:
    chunks, root = HotChunks(2), bytes(32)
    chunks.stored([1, 2], None, [1, 2, 3, 4], chunks.root_of(chunks.salt(root)))
    before = chunks.take_changes().added
    assert len(before) == 2
    old = chunks.salt(root)
    assert chunks.forget() == 2
    assert chunks.take_changes().is_reset
    assert chunks.salt(root) != old
    chunks.stored([3], 2, [5, 6], b"")
    chunks.stored([4], None, [7, 8], chunks.root_of(old))
    assert not chunks.take_changes().added, "what goes on under the old salt is found by nobody"
    chunks.stored([5, 6], None, [1, 2, 3, 4], chunks.root_of(chunks.salt(root)))
    assert chunks.take_changes().added == before


def test_a_cache_of_blocks_forgets_one_root_and_keeps_the_others() -> None:
    chunks, roots = HotChunks(2), [bytes([number]) * 32 for number in range(3)]

    def store(number: int, root: bytes) -> frozenset[ChunkKey]:
        chunks.stored([number, number + 1], None, [1, 2, 3, 4], chunks.root_of(chunks.salt(root)))
        return chunks.take_changes().added

    before = [store(10 * number, root) for number, root in enumerate(roots)]
    salts = [chunks.salt(root) for root in roots]
    assert chunks.forget(roots[:1]) == 2
    changes = chunks.take_changes()
    assert (changes.added, changes.removed, changes.is_reset) == (frozenset(), before[0], False)
    assert [chunks.salt(root) == salt for root, salt in zip(roots, salts, strict=True)] == [False, True, True]
    assert [chunks.root_of(salt) for salt in salts] == [None, *roots[1:]]
    chunks.stored([2], 1, [5, 6], b"")
    assert not chunks.take_changes().added, "what it stands behind is forgotten"
    assert store(40, roots[0]) == before[0]
    chunks.forget()
    chunks.forget(roots[1:2])
    used = {*salts, *(chunks.salt(root) for root in roots)}
    assert len(used) == 6, "no salt comes back"
    assert [store(100 + 10 * number, root) for number, root in enumerate(roots)] == before


def test_what_was_computed_for_too_many_is_forgotten_whole() -> None:
    makers, model = Makers(max_noted=2), ModelName("m")
    for tenant in ("a", "b", "a", "b"):
        makers.note(tenant.encode(), TenantId(tenant), model)
    assert makers.roots_of(Selection(tenant=TenantId("a"))) == frozenset({b"a"})
    assert makers.roots_of(Selection(model=model)) == frozenset({b"a", b"b"})
    assert makers.roots_of(Selection(everything=True)) is None
    makers.note(b"c", TenantId("c"), model)
    assert makers.roots_of(Selection(tenant=TenantId("a"))) is None
