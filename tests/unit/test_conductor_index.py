"""The chunk index against a naive one, and its rules for epochs."""

from hypothesis import given
from hypothesis import strategies as st

from halfmoon.scheduling.index import ChunkIndex
from halfmoon.schemas.chunks import (
    ChunkEvent,
    ChunkEvicted,
    ChunkMeta,
    ChunkPlacement,
    ChunkRegistered,
    EvictReason,
    NodeCleared,
)
from halfmoon.schemas.ids import ChunkKey, NodeId, RequestId
from support.naive_index import NaiveIndex

NODES = [NodeId("a"), NodeId("b"), NodeId("c")]
KEYS = [ChunkKey(bytes([number]) * 32) for number in range(6)]


def meta(key: ChunkKey) -> ChunkMeta:
    return ChunkMeta(
        key=key,
        index=0,
        num_tokens=16,
        num_bytes=64,
        checksum=b"\0" * 16,
        request_id=RequestId("r"),
        created_ns=1,
    )


def registered(node: NodeId, epoch: int, *keys: ChunkKey) -> ChunkRegistered:
    return ChunkRegistered(node=node, epoch=epoch, chunks=tuple(meta(key) for key in keys))


def evicted(node: NodeId, epoch: int, *keys: ChunkKey) -> ChunkEvicted:
    return ChunkEvicted(node=node, epoch=epoch, keys=keys, reason=EvictReason.CAPACITY)


some_keys = st.lists(st.sampled_from(KEYS), max_size=4)
events = st.lists(
    st.one_of(
        st.builds(lambda n, e, k: registered(n, e, *k), st.sampled_from(NODES), st.integers(1, 3), some_keys),
        st.builds(lambda n, e, k: evicted(n, e, *k), st.sampled_from(NODES), st.integers(1, 3), some_keys),
        st.builds(lambda n, e: NodeCleared(node=n, epoch=e), st.sampled_from(NODES), st.integers(1, 3)),
    ),
    max_size=30,
)


@given(events=events, live=st.dictionaries(st.sampled_from(NODES), st.integers(1, 3)))
def test_it_agrees_with_a_naive_model(events: list[ChunkEvent], live: dict[NodeId, int]) -> None:
    index, naive = ChunkIndex(), NaiveIndex()
    for event in events:
        index.apply(event)
        naive.events.append(event)
    for key in KEYS:
        assert index.nodes_of(key) == {node for node in NODES if naive.holds(node, key)}
    assert len(index) == sum(any(naive.holds(node, key) for node in NODES) for key in KEYS)

    trusted = {node for node, epoch in live.items() if naive.epoch(node) == epoch}
    match = index.match(KEYS, live)
    expected = []
    for key in KEYS:
        holders = {node for node in trusted if naive.holds(node, key)}
        if not holders:
            break
        expected.append(holders)
    assert list(match.holders) == expected
    for node in NODES:
        assert match.num_held(node) == sum(node in holders for holders in expected)
        leading = [node in holders for holders in expected]
        assert match.num_leading(node) == (leading.index(False) if False in leading else len(leading))


@given(events=events, extra=events)
def test_a_snapshot_and_the_events_after_it_are_as_good_as_all_events(
    events: list[ChunkEvent], extra: list[ChunkEvent]
) -> None:
    whole, naive = ChunkIndex(), NaiveIndex()
    for event in events:
        whole.apply(event)
        naive.events.append(event)
    snapshot = [
        ChunkPlacement(node=node, epoch=epoch, chunk=meta(key))
        for node in NODES
        for key in KEYS
        if naive.holds(node, key) and (epoch := naive.epoch(node)) is not None
    ]
    epochs = {node: epoch for node in NODES if (epoch := naive.epoch(node)) is not None}
    rebuilt = ChunkIndex.of(snapshot, epochs)
    # Events of any epoch follow; also of older ones, of nodes that hold nothing since.
    for event in extra:
        whole.apply(event)
        rebuilt.apply(event)
    assert [rebuilt.nodes_of(key) for key in KEYS] == [whole.nodes_of(key) for key in KEYS]
    assert rebuilt.epochs == whole.epochs


def test_a_restarted_node_gets_no_credit_for_its_former_life() -> None:
    index = ChunkIndex()
    index.apply(registered(NODES[0], 1, *KEYS))
    assert len(index.match(KEYS, {NODES[0]: 1})) == len(KEYS)
    assert len(index.match(KEYS, {NODES[0]: 2})) == 0
    index.apply(NodeCleared(node=NODES[0], epoch=2))
    index.apply(registered(NODES[0], 1, KEYS[0]))
    assert len(index) == 0


def test_a_snapshot_of_a_node_that_cleared_refuses_what_its_older_life_says_late() -> None:
    index = ChunkIndex.of([], {NODES[0]: 2})
    index.apply(registered(NODES[0], 1, *KEYS))
    assert len(index) == 0
    index.apply(registered(NODES[0], 2, KEYS[0]))
    assert len(index.match(KEYS, {NODES[0]: 2})) == 1


def test_a_node_that_is_away_is_not_matched_and_one_that_starts_anew_is_forgotten() -> None:
    index = ChunkIndex()
    index.apply(registered(NODES[0], 1, *KEYS[:2]))
    index.apply(registered(NODES[1], 7, KEYS[0]))
    assert len(index.match(KEYS, {NODES[1]: 7})) == 1
    index.apply(NodeCleared(node=NODES[0], epoch=0))
    assert len(index.match(KEYS, {NODES[0]: 1})) == 2
    index.apply(NodeCleared(node=NODES[0], epoch=2))
    assert len(index) == 1
