"""What conductors make of what workers tell of their engines' caches: right, or nothing."""

from hypothesis import given
from hypothesis import strategies as st

from halfmoon.conductor.hot import HotIndex
from halfmoon.engine.contract import HotChanges
from halfmoon.schemas.caches import CacheChanges, CacheSnapshot
from halfmoon.schemas.ids import ChunkKey, WorkerId
from halfmoon.worker.cache_news import CacheNews

KEYS = [ChunkKey(bytes([number]) * 32) for number in range(8)]
W1, W2 = WorkerId("w1"), WorkerId("w2")
SNAPSHOT_S = 10.0


def snapshot(seq: int, *keys: ChunkKey, started_ns: int = 1, part: int = 0, num_parts: int = 1) -> CacheSnapshot:
    return CacheSnapshot(worker=W1, started_ns=started_ns, seq=seq, keys=keys, part=part, num_parts=num_parts)


def changes(seq: int, *added: ChunkKey, removed: tuple[ChunkKey, ...] = (), started_ns: int = 1) -> CacheChanges:
    return CacheChanges(worker=W1, started_ns=started_ns, seq=seq, added=added, removed=removed)


def hot(*added: ChunkKey, removed: tuple[ChunkKey, ...] = (), is_reset: bool = False) -> HotChanges:
    return HotChanges(frozenset(added), frozenset(removed), is_reset)


def test_leading_chunks_end_at_the_first_that_is_not_hot() -> None:
    index = HotIndex()
    index.hear(snapshot(1, KEYS[0], KEYS[1], KEYS[3]))
    assert index.leading(KEYS[:5]) == {W1: 2}
    assert index.leading([KEYS[0]]) == {W1: 1}
    assert index.leading([KEYS[2], KEYS[3]]) == {}
    assert index.leading([]) == {}
    index.hear(changes(2, KEYS[2], removed=(KEYS[3],)))
    assert index.leading(KEYS[:5]) == {W1: 3}
    assert index.num_chunks() == {W1: 3}


def test_from_a_gap_on_nothing_counts_until_the_next_snapshot() -> None:
    index = HotIndex()
    index.hear(snapshot(1, *KEYS[:4]))
    index.hear(changes(3, KEYS[4]))
    assert index.leading(KEYS) == {}
    index.hear(changes(4, KEYS[5]))
    assert index.leading(KEYS) == {}
    index.hear(snapshot(5, KEYS[0]))
    assert index.leading(KEYS) == {W1: 1}


def test_who_comes_late_waits_for_a_snapshot() -> None:
    index = HotIndex()
    index.hear(changes(17, KEYS[0]))
    assert index.leading(KEYS) == {}
    assert index.num_chunks() == {W1: 0}
    index.hear(snapshot(18, KEYS[0]))
    assert index.leading(KEYS) == {W1: 1}


def test_a_snapshot_counts_with_its_last_part() -> None:
    index = HotIndex()
    index.hear(snapshot(1, KEYS[0]))
    index.hear(snapshot(2, KEYS[0], KEYS[1], part=0, num_parts=2))
    assert index.leading(KEYS) == {W1: 1}
    index.hear(snapshot(3, KEYS[2], part=1, num_parts=2))
    assert index.leading(KEYS) == {W1: 3}
    # One that lacks its beginning is no snapshot.
    index.hear(snapshot(9, KEYS[3], part=1, num_parts=2))
    assert index.leading(KEYS) == {}
    index.hear(snapshot(10, KEYS[3], part=0, num_parts=10_000))
    assert index.leading(KEYS) == {}


def test_a_new_life_begins_with_nothing_and_an_old_one_is_not_heard_again() -> None:
    index = HotIndex()
    index.hear(snapshot(1, *KEYS[:4]))
    index.hear(snapshot(1, KEYS[0], started_ns=2))
    assert index.leading(KEYS) == {W1: 1}
    index.hear(snapshot(2, *KEYS[:4], started_ns=1))
    assert index.leading(KEYS) == {W1: 1}
    index.forget(W1)
    index.forget(W1)
    assert index.leading(KEYS) == {}
    assert index.num_chunks() == {}


def test_nothing_is_told_until_something_is_hot() -> None:
    news = CacheNews(W1, 1)
    assert news.take(hot(), 0.0) == []
    assert news.take(hot(is_reset=True), 100.0) == []
    assert news.take(hot(KEYS[1], KEYS[0]), 100.2) == [snapshot(1, KEYS[0], KEYS[1])]
    assert news.take(hot(), 100.4) == []
    assert news.take(hot(KEYS[2], removed=(KEYS[0],)), 100.6) == [changes(2, KEYS[2], removed=(KEYS[0],))]
    assert news.take(hot(KEYS[2], removed=(KEYS[7],)), 100.8) == []
    assert news.take(hot(KEYS[3], is_reset=True), 101.0) == [changes(3, KEYS[3], removed=(KEYS[1], KEYS[2]))]
    assert news.take(hot(), 111.0) == [snapshot(4, KEYS[3])]
    assert news.take(hot(removed=(KEYS[3],)), 111.2) == [changes(5, removed=(KEYS[3],))]
    assert news.take(hot(), 122.0) == [snapshot(6)]


def test_what_could_not_be_sent_is_told_anew() -> None:
    news = CacheNews(W1, 1)
    news.not_sent()
    assert news.take(hot(), 0.0) == []
    news.take(hot(KEYS[0]), 1.0)
    news.not_sent()
    assert news.take(hot(), 1.2) == [snapshot(2, KEYS[0])]


def test_messages_are_bounded() -> None:
    news = CacheNews(W1, 1, max_keys=2, max_parts=2)
    assert news.take(hot(*KEYS[:3]), 0.0) == [
        snapshot(1, *KEYS[:2], num_parts=2),
        snapshot(2, KEYS[2], part=1, num_parts=2),
    ]
    # Too many changes for one message are a snapshot, and what exceeds it isn't told.
    assert news.take(hot(*KEYS[3:6], removed=(KEYS[0], KEYS[1])), 0.2) == [
        snapshot(3, KEYS[2], KEYS[3], num_parts=2),
        snapshot(4, KEYS[4], KEYS[5], part=1, num_parts=2),
    ]
    assert news.take(hot(KEYS[7]), 0.4) == []
    assert news.take(hot(KEYS[0], removed=(KEYS[2],)), 0.6) == [changes(5, KEYS[0], removed=(KEYS[2],))]


steps = st.lists(
    st.tuples(
        st.frozensets(st.sampled_from(KEYS), max_size=4),
        st.frozensets(st.sampled_from(KEYS), max_size=4),
        st.booleans(),
        st.sampled_from([0.25, 1.0, SNAPSHOT_S]),
        st.lists(st.booleans(), min_size=8, max_size=8),
    ),
    max_size=12,
)


@given(steps=steps, max_keys=st.integers(1, 8))
def test_whatever_is_lost_on_the_way_credit_is_never_wrong_and_comes_back(
    steps: list[tuple[frozenset[ChunkKey], frozenset[ChunkKey], bool, float, list[bool]]], max_keys: int
) -> None:
    """The receiver knows what the sender had when it sent the last message heard, or that it doesn't know."""
    news, index, truth, now_s = CacheNews(W1, 1, max_keys=max_keys), HotIndex(), set[ChunkKey](), 0.0
    has_told = False
    for added, removed, is_reset, passed_s, is_lost in steps:
        now_s += passed_s
        kept = frozenset() if is_reset else truth - removed
        messages = news.take(HotChanges(added, removed - added, is_reset), now_s)
        truth = set(kept | added)
        has_told = has_told or bool(messages)
        heard = [message for message, lost in zip(messages, is_lost, strict=False) if not lost]
        for message in heard:
            index.hear(message)
        if messages and heard and heard[-1] is messages[-1]:
            assert index.num_chunks()[W1] in (0, len(truth))
            if index.num_chunks()[W1]:
                assert index.leading(sorted(truth)) == {W1: len(truth)}
        if len(heard) == len(messages) and any(isinstance(message, CacheSnapshot) for message in messages):
            assert index.leading(sorted(truth)) == ({W1: len(truth)} if truth else {})
    for message in news.take(HotChanges(), now_s + SNAPSHOT_S):
        index.hear(message)
    assert index.leading(sorted(truth)) == ({W1: len(truth)} if truth else {})
    assert (W1 in index.num_chunks()) == has_told


@given(
    told=st.dictionaries(st.sampled_from([W1, W2]), st.frozensets(st.sampled_from(KEYS))),
    prompt=st.lists(st.sampled_from(KEYS), unique=True),
)
def test_leading_against_counting(told: dict[WorkerId, frozenset[ChunkKey]], prompt: list[ChunkKey]) -> None:
    index = HotIndex()
    for worker, keys in told.items():
        index.hear(CacheSnapshot(worker=worker, started_ns=1, seq=1, keys=tuple(keys)))
    for worker in (W1, W2):
        held = told.get(worker, frozenset())
        expected = max((count for count in range(len(prompt) + 1) if held.issuperset(prompt[:count])), default=0)
        assert index.leading(prompt).get(worker, 0) == expected
