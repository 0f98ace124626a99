"""The chunk index against a plain one, whatever happens in whatever order; more nodes than a machine word has bits."""

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from halfmoon.scheduling.index import ChunkIndex
from halfmoon.schemas.chunks import ChunkEvent, ChunkEvicted, ChunkPlacement, EvictReason, NodeCleared, Tier
from halfmoon.schemas.ids import ChunkKey, NodeId
from support.naive_index import PlainIndex
from support.registry import meta, registered

NUM_KEYS = 24
NODES = [NodeId(f"n{number}") for number in range(70)]
NUMBERS = st.integers(0, NUM_KEYS - 1)
KEYS = [meta(number).key for number in range(NUM_KEYS)]

some_numbers = st.lists(NUMBERS, max_size=NUM_KEYS)
node_ids = st.one_of(st.sampled_from(NODES[:3]), st.sampled_from(NODES))
later = st.integers(-1, 2)


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = ChunkIndex()
        self.plain = PlainIndex()
        self.live: dict[NodeId, int] = {}

    @initialize(crowd=st.booleans())
    def all_nodes_hold_the_first_chunk(self, crowd: bool) -> None:
        for node in NODES if crowd else ():
            self.happens(registered(node, 1, 0))

    def happens(self, event: ChunkEvent) -> None:
        self.index.apply(event)
        self.plain.apply(event)

    def epoch(self, node: NodeId, step: int) -> int:
        return self.plain.epochs.get(node, 1) + step

    @rule(
        node=node_ids,
        numbers=some_numbers,
        step=st.sampled_from((0, 0, 0, -1, 1)),
        tier=st.sampled_from((Tier.DRAM, Tier.DRAM, Tier.SSD)),
    )
    def registers(self, node: NodeId, numbers: list[int], step: int, tier: Tier) -> None:
        event = registered(node, self.epoch(node, step), *numbers)
        chunks = tuple(msgspec.structs.replace(chunk, tier=tier) for chunk in event.chunks)
        self.happens(msgspec.structs.replace(event, chunks=chunks))

    @rule(node=node_ids, numbers=some_numbers, step=st.sampled_from((0, 0, 0, -1, 1)))
    def evicts(self, node: NodeId, numbers: list[int], step: int) -> None:
        keys = tuple(KEYS[number] for number in numbers)
        self.happens(ChunkEvicted(node=node, epoch=self.epoch(node, step), keys=keys, reason=EvictReason.CAPACITY))

    @rule(node=node_ids, step=later)
    def clears(self, node: NodeId, step: int) -> None:
        self.happens(NodeCleared(node=node, epoch=self.epoch(node, step)))

    @rule(node=node_ids, step=later)
    def is_heard(self, node: NodeId, step: int) -> None:
        self.live = {**self.live, node: self.epoch(node, step)}

    @rule(node=node_ids)
    def falls_silent(self, node: NodeId) -> None:
        self.live = {each: epoch for each, epoch in self.live.items() if each != node}

    @rule()
    def all_are_heard(self) -> None:
        self.live = dict(self.plain.epochs)

    @rule()
    def is_built_anew(self) -> None:
        placements = [
            ChunkPlacement(
                node=node,
                epoch=self.plain.epochs[node],
                chunk=msgspec.structs.replace(
                    meta(KEYS.index(key)), tier=Tier.SSD if node in self.plain.on_ssd[key] else Tier.DRAM
                ),
            )
            for key, nodes in self.plain.holders.items()
            for node in nodes
        ]
        self.index = ChunkIndex.of(placements, self.plain.epochs)

    @rule(numbers=some_numbers)
    def a_prompt_is_matched(self, numbers: list[int]) -> None:
        self.is_as_plain([KEYS[number] for number in numbers])

    def is_as_plain(self, keys: list[ChunkKey]) -> None:
        match, on_ssd = self.index.match(keys, self.live), self.plain.matched_on_ssd(keys, self.live)
        assert match.holders == self.plain.match(keys, self.live)
        assert list(match.on_ssd) == on_ssd or (match.on_ssd == () and not any(on_ssd))
        for node in NODES[:3]:
            assert match.num_on_ssd(node) == sum(node in nodes for nodes in on_ssd)

    @invariant()
    def it_says_what_the_plain_one_says(self) -> None:
        assert len(self.index) == len(self.plain.holders)
        assert dict(self.index.epochs) == self.plain.epochs
        for key in KEYS:
            assert self.index.nodes_of(key) == self.plain.holders.get(key, set())
        self.is_as_plain(KEYS)
        assert self.index.num_sets <= len(self.plain.holders) + 1 + self.index.num_orphans


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestIndexMachine = IndexMachine.TestCase


def test_keys_that_differ_in_the_last_byte_only_are_different_chunks() -> None:
    index = ChunkIndex()
    index.apply(registered(NODES[0], 1, 1))
    twin = ChunkKey(KEYS[1][:-1] + b"\xff")
    assert not index.match([twin], {NODES[0]: 1})
    assert len(index.match([KEYS[1]], {NODES[0]: 1})) == 1


def test_chunks_of_a_node_that_went_are_swept_out_as_events_arrive() -> None:
    index = ChunkIndex()
    index.apply(registered(NODES[0], 1, *range(10_000)))
    index.apply(NodeCleared(node=NODES[0], epoch=2))
    assert len(index) == 0
    for _ in range(6):
        index.apply(NodeCleared(node=NODES[1], epoch=1))
    assert (index.num_orphans, index.num_sets) == (0, 1)
