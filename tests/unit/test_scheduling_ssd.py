"""What a scheduler makes of chunks that nodes have on their SSDs only: by hand."""

import pytest

from halfmoon.scheduling.estimates import Assumed
from halfmoon.scheduling.index import Match
from halfmoon.scheduling.prefix import CachedPrefix
from halfmoon.schemas.ids import NodeId

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
NOBODY = frozenset[NodeId]()
MATCH = Match(
    (frozenset({A, B}), frozenset({A, B}), frozenset({A, C}), frozenset({C})),
    (frozenset({A}), NOBODY, frozenset({A, C}), frozenset({C})),
)


def test_sources_are_the_own_node_then_memory_then_ssds() -> None:
    def named(match: Match, num_chunks: int, node: NodeId) -> list[list[NodeId]]:
        prefix = CachedPrefix(match, 100, Assumed(), "salt")
        return [[source.node for source in each] for each in prefix.sources(num_chunks, node, {A: 1, B: 2, C: 3})]

    places = named(MATCH, 4, C)
    assert (places[0], places[2:]) == ([B, A], [[C, A], [C]])
    assert set(places[1]) == {A, B}
    assert named(MATCH, 1, A) == [[A, B]]
    assert [set(each) for each in named(Match(MATCH.holders), 2, C)] == [{A, B}, {A, B}]


def test_a_node_pays_for_reading_its_own_ssd_and_for_others() -> None:
    estimates = Assumed(pull_bytes_per_s=100.0, ssd_bytes_per_s=50.0)
    prefix = CachedPrefix(MATCH, 100, estimates, "salt")
    assert [prefix.on(node).num_leading for node in (A, B)] == [3, 2]
    assert [prefix.on(node).read_s for node in (A, B)] == pytest.approx([2 * 2.0, 0.0])
    # A reads two of its own and pulls the last from C's SSD: (2 + 1) s. C pulls the first two from memory: 1 s each.
    assert [prefix.pull_to(node).num_chunks for node in (A, C)] == [1, 2]
    assert [prefix.pull_to(node).total_s for node in (A, C)] == pytest.approx([4.0 + 3.0, 2.0 + 2 * 2.0])
    assert MATCH.num_on_ssd(A) == 2
    assert MATCH.num_on_ssd(C) == 2
