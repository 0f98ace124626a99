"""What the leader plans: every sequence of events against a naive model, and the life of node records."""

from hypothesis import given
from hypothesis import strategies as st

from halfmoon.registry.policy import (
    DropNode,
    DropPlacement,
    NodeRecord,
    PutNode,
    PutPlacement,
    Step,
    after,
    coalesce,
    plan_event,
    plan_nodes,
    plan_sweep,
    plan_swept,
    sweep_due,
    visible,
)
from halfmoon.schemas.chunks import ChunkEvent, ChunkEvicted, ChunkPlacement, ChunkRegistered
from halfmoon.schemas.ids import ChunkKey, NodeId
from support.registry import cleared, evicted, key, placement, registered

NODE = NodeId("a")


class Naive:
    """What a reader of the stream would hold who keeps one dictionary per node."""

    def __init__(self) -> None:
        self.epochs: dict[NodeId, int] = {}
        self.held: dict[NodeId, dict[ChunkKey, ChunkPlacement]] = {}

    def take(self, event: ChunkEvent) -> None:
        if event.epoch < self.epochs.get(event.node, 0):
            return
        if event.epoch > self.epochs.get(event.node, 0):
            self.epochs[event.node] = event.epoch
            self.held[event.node] = {}
        mine = self.held[event.node]
        if isinstance(event, ChunkRegistered):
            for chunk in event.chunks:
                mine[chunk.key] = ChunkPlacement(node=event.node, epoch=event.epoch, chunk=chunk)
        elif isinstance(event, ChunkEvicted):
            for gone in event.keys:
                mine.pop(gone, None)

    def placements(self) -> set[ChunkPlacement]:
        return {held for mine in self.held.values() for held in mine.values()}


class Table:
    """etcd as a dictionary: one transaction may not write a key twice."""

    def __init__(self) -> None:
        self.nodes: dict[NodeId, NodeRecord] = {}
        self.placements: dict[tuple[ChunkKey, NodeId], ChunkPlacement] = {}

    def write(self, steps: tuple[Step, ...]) -> None:
        steps = coalesce(steps)
        self.nodes = after(self.nodes, steps)
        for step in steps:
            if isinstance(step, PutPlacement):
                self.placements[step.placement.chunk.key, step.placement.node] = step.placement
            elif isinstance(step, DropPlacement):
                self.placements.pop((step.key, step.node), None)

    def seen(self) -> set[ChunkPlacement]:
        return {each for each in self.placements.values() if visible(each, self.nodes)}


_numbers = st.lists(st.integers(0, 5), max_size=4)
_events = st.one_of(
    st.builds(lambda n, e, xs: registered(n, e, *xs), st.sampled_from("ab"), st.integers(1, 3), _numbers),
    st.builds(lambda n, e, xs: evicted(n, e, *xs), st.sampled_from("ab"), st.integers(1, 3), _numbers),
    st.builds(cleared, st.sampled_from("ab"), st.integers(1, 3)),
)


@given(st.lists(st.lists(_events, max_size=5), max_size=8), st.booleans())
def test_what_readers_see_is_what_the_stream_says(batches: list[list[ChunkEvent]], sweep_between: bool) -> None:
    naive, table = Naive(), Table()
    for batch in batches:
        nodes: dict[NodeId, NodeRecord] = table.nodes
        steps: tuple[Step, ...] = ()
        for event in batch:
            naive.take(event)
            planned = plan_event(event, nodes)
            nodes, steps = after(nodes, planned), (*steps, *planned)
        table.write(steps)
        if sweep_between:
            found = {node: table.nodes[node] for node in sweep_due(table.nodes, forget_after_s=60, now_ns=0)}
            table.write(plan_sweep(table.placements.values(), table.nodes, forget_after_s=60, now_ns=0))
            table.write(plan_swept(found, table.nodes, forget_after_s=60, now_ns=0))
            assert set(table.placements.values()) == naive.placements(), "nothing is left that nobody sees"
        assert table.seen() == naive.placements()


@given(st.lists(_events, max_size=12), st.integers(0, 12))
def test_repeating_the_last_events_changes_nothing(events: list[ChunkEvent], again_from: int) -> None:
    table = Table()
    for event in [*events, *events[again_from:]]:
        table.write(plan_event(event, table.nodes))
    naive = Naive()
    for event in events:
        naive.take(event)
    assert table.seen() == naive.placements()


def test_an_older_life_of_a_node_plans_nothing() -> None:
    nodes = {NODE: NodeRecord(node=NODE, epoch=5)}
    assert plan_event(registered("a", 4, 1), nodes) == ()
    assert plan_event(evicted("a", 4, 1), nodes) == ()
    assert plan_event(cleared("a", 4), nodes) == ()


def test_a_new_epoch_is_one_small_write_however_much_the_old_one_held() -> None:
    nodes = {NODE: NodeRecord(node=NODE, epoch=5)}
    assert plan_event(cleared("a", 6), nodes) == (PutNode(NodeRecord(node=NODE, epoch=6, stale=True)),)


def test_the_last_write_to_a_key_wins_within_a_batch() -> None:
    steps = (*plan_event(registered("a", 1, 7), {}), DropPlacement(key(7), NODE))
    assert coalesce(steps) == (PutNode(NodeRecord(node=NODE, epoch=1)), DropPlacement(key(7), NODE))


def _judge(
    record: NodeRecord, present: dict[NodeId, int], gone: frozenset[NodeId], leading_s: float
) -> tuple[Step, ...]:
    return plan_nodes({NODE: record}, present, gone, leading_s=leading_s, grace_s=10.0, now_ns=77)


def test_a_node_that_went_is_lost_at_once_and_one_unheard_of_after_the_grace() -> None:
    record = NodeRecord(node=NODE, epoch=5)
    lost = (PutNode(NodeRecord(node=NODE, epoch=5, lost_ns=77)),)
    assert _judge(record, {}, frozenset({NODE}), 0.0) == lost
    assert _judge(record, {}, frozenset(), 9.9) == ()
    assert _judge(record, {}, frozenset(), 10.0) == lost
    assert _judge(record, {NODE: 5}, frozenset(), 99.0) == ()


def test_a_node_that_comes_back_in_the_same_epoch_shows_again_in_another_it_does_not() -> None:
    record = NodeRecord(node=NODE, epoch=5, lost_ns=1)
    assert not visible(placement("a", 5, 1), {NODE: record})
    assert _judge(record, {NODE: 5}, frozenset(), 0.0) == (PutNode(NodeRecord(node=NODE, epoch=5)),)
    assert _judge(record, {NODE: 6}, frozenset(), 0.0) == ()
    assert _judge(record, {}, frozenset({NODE}), 99.0) == (), "lost already"


def test_a_lost_node_is_forgotten_with_its_placements_once_its_time_is_up() -> None:
    nodes = {NODE: NodeRecord(node=NODE, epoch=5, lost_ns=0)}
    held = (placement("a", 5, 1), placement("b", 1, 1))
    assert sweep_due(nodes, forget_after_s=60, now_ns=60 * 10**9 - 1) == frozenset()
    assert sweep_due(nodes, forget_after_s=60, now_ns=60 * 10**9) == {NODE}
    steps = plan_sweep(held, nodes, forget_after_s=60, now_ns=60 * 10**9)
    assert steps == (DropPlacement(key(1), NODE), DropPlacement(key(1), NodeId("b"))), "b has no record at all"
    assert plan_swept(nodes, nodes, forget_after_s=60, now_ns=60 * 10**9) == (DropNode(NODE),)


def test_a_record_that_changed_during_a_sweep_is_left_for_the_next() -> None:
    found = {NODE: NodeRecord(node=NODE, epoch=5, stale=True)}
    now = {NODE: NodeRecord(node=NODE, epoch=6, stale=True)}
    assert plan_swept(found, now, forget_after_s=60, now_ns=0) == ()
    assert plan_swept(found, found, forget_after_s=60, now_ns=0) == (PutNode(NodeRecord(node=NODE, epoch=5)),)
