"""Copies by demand: never more than the bound, apart where that can be, where there is room, and no storms."""

from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.scheduling.continuations import Continuations
from halfmoon.scheduling.copies import MACHINE, CopyLimits, in_order, nearness, surplus, wanted_copies
from halfmoon.scheduling.demand import Demand
from halfmoon.scheduling.replication import MAX_ORDER_CHUNKS, Order, Pool, ReplicaPlanner, Run
from halfmoon.schemas.ids import ChunkKey, NodeId

MIB = 1 << 20
LIMITS = CopyLimits(max_copies=3, uses_per_copy=4.0, pinned_copies=2)
NODES = [NodeId(f"node-{letter}") for letter in "abcdef"]
node_sets = st.sets(st.sampled_from(NODES), min_size=1)
label_maps = st.dictionaries(
    st.sampled_from(NODES),
    st.fixed_dictionaries({}, optional={"zone": st.sampled_from("xy"), "rack": st.sampled_from("123")}),
)


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "big"))


def run_of(*numbers: int, num_bytes: int = MIB) -> Run:
    return Run(tuple(key(number) for number in numbers), 256, num_bytes)


def pool(node: NodeId, free: int = 100, ready: int = 0, slots: int = 100) -> Pool:
    return Pool(node=node, num_slots=slots, num_free=free, num_ready=ready)


class Cluster:
    """Pools whose copies appear as soon as they are ordered."""

    def __init__(
        self, nodes: Sequence[NodeId], labels: Mapping[NodeId, Mapping[str, str]] | None = None, mib_per_s: float = 1e6
    ) -> None:
        self.pools = {node: pool(node) for node in nodes}
        self.labels = labels or {}
        self.held: dict[ChunkKey, set[NodeId]] = {}
        self.planner = ReplicaPlanner(LIMITS, Demand(60.0), mib_per_s * MIB)
        self.now_s = 100.0

    def put(self, node: NodeId, *numbers: int) -> None:
        for number in numbers:
            self.held.setdefault(key(number), set()).add(node)

    def use(self, run: Run, times: int = 1) -> None:
        for _ in range(times):
            self.planner.used(run, self.now_s)

    def orders(self, pinned: Sequence[Run] = ()) -> list[Order]:
        return self.planner.orders(
            lambda keys: list(takewhile(bool, (frozenset(self.held.get(key, ())) for key in keys))),
            self.pools,
            self.labels,
            self.now_s,
            pinned,
        )

    def carry_out(self, orders: Sequence[Order]) -> None:
        for order in orders:
            for at in order.positions:
                assert self.held[order.run.keys[at]], "ordered from nobody"
                self.held[order.run.keys[at]].add(order.destination)


def test_demand_halves_with_each_half_life_and_forgets_what_is_unused_longest() -> None:
    demand = Demand(10.0, max_chunks=3)
    assert demand.use([key(1), key(2)], 0.0) == [1.0, 1.0]
    assert demand.use([key(1)], 10.0) == [1.5]
    assert demand.uses([key(1)], 20.0)[0] == pytest.approx(0.75)
    assert demand.uses([key(1)], 5.0)[0] == pytest.approx(0.75), "a clock that goes back stands still"
    demand.use([key(3), key(4)], 20.0)
    assert [demand.uses([key(number)], 20.0)[0] > 0 for number in (1, 2, 3, 4)] == [True, False, True, True]


@given(st.lists(st.tuples(st.integers(0, 8), st.floats(0, 100)), max_size=30))
def test_along_a_prefix_the_counts_never_rise(prompts: list[tuple[int, float]]) -> None:
    demand = Demand(10.0)
    now_s = 0.0
    for length, pause_s in prompts:
        now_s += pause_s
        demand.use([key(number) for number in range(length)], now_s)
    uses = demand.uses([key(number) for number in range(8)], now_s)
    assert uses == sorted(uses, reverse=True)


@given(st.floats(0, 1000), st.booleans())
def test_copies_are_wanted_in_proportion_and_up_to_the_bound(uses: float, pinned: bool) -> None:
    wanted = wanted_copies(uses, LIMITS, pinned=pinned)
    assert (2 if pinned else 1) <= wanted <= 3
    assert wanted == max(min(3, 1 + int(uses // 4)), 2 if pinned else 1)


@settings(max_examples=50)
@given(node_sets, label_maps, st.integers(0, 4), st.binary(min_size=32, max_size=32))
def test_those_who_keep_theirs_are_never_fewer_than_wanted(
    holders: set[NodeId], labels: dict[NodeId, dict[str, str]], wanted: int, raw: bytes
) -> None:
    going = surplus(ChunkKey(raw), holders, wanted, labels)
    assert len(holders - going) == min(len(holders), max(1, wanted))
    for fewer in range(max(1, wanted)):
        assert going <= surplus(ChunkKey(raw), holders, fewer, labels), "whoever wants fewer lets the same ones go too"


@given(node_sets, st.sampled_from(NODES), st.binary(min_size=32, max_size=32))
def test_without_labels_another_holder_takes_nobody_elses_turn(holders: set[NodeId], new: NodeId, raw: bytes) -> None:
    before = in_order(ChunkKey(raw), holders - {new}, {})
    assert [node for node in in_order(ChunkKey(raw), holders | {new}, {}) if node != new] == before


@given(node_sets, label_maps, st.binary(min_size=32, max_size=32))
def test_the_second_copy_that_is_kept_is_as_far_away_as_can_be(
    holders: set[NodeId], labels: dict[NodeId, dict[str, str]], raw: bytes
) -> None:
    first, *rest = in_order(ChunkKey(raw), holders, labels)
    if rest:
        assert nearness(rest[0], [first], labels) == min(nearness(node, [first], labels) for node in rest)


def test_a_hot_prefix_gets_copies_one_after_the_other_and_its_cold_end_none() -> None:
    cluster = Cluster(NODES[:4])
    cluster.put(NODES[0], 1, 2, 3)
    cluster.use(run_of(1, 2, 3), 3)
    assert cluster.orders() == []
    cluster.use(run_of(1, 2))
    (order,) = cluster.orders()
    assert [order.run.keys[at] for at in order.positions] == [key(1), key(2)]
    assert order.destination != NODES[0]
    cluster.carry_out([order])
    cluster.use(run_of(1, 2))
    assert cluster.orders() == [], "two copies are enough for five uses"
    cluster.use(run_of(1, 2), 40)
    while orders := cluster.orders():
        cluster.carry_out(orders)
        cluster.use(run_of(1, 2))
    assert [len(cluster.held[key(number)]) for number in (1, 2, 3)] == [3, 3, 1]


def test_what_was_ordered_counts_as_there_until_it_should_have_come() -> None:
    cluster = Cluster(NODES[:4])
    cluster.put(NODES[0], 1)
    cluster.use(run_of(1), 5)
    (first,) = cluster.orders()
    cluster.use(run_of(1))
    assert cluster.orders() == []
    cluster.planner.failed(first)
    cluster.use(run_of(1))
    (again,) = cluster.orders()
    assert again == first, "the same lot is drawn"
    cluster.now_s += 11
    cluster.use(run_of(1))
    assert len(cluster.orders()) == 1


@given(st.permutations(NODES))
def test_another_rack_comes_first_and_then_the_emptier_pool(order: list[NodeId]) -> None:
    holder, near, far, full_far, *_ = order
    labels = {holder: {"rack": "1"}, near: {"rack": "1"}, far: {"rack": "2"}, full_far: {"rack": "2"}}
    cluster = Cluster([holder, near, far, full_far], labels)
    cluster.pools[far] = pool(far, free=20)
    cluster.pools[far] = Pool(node=far, num_slots=100, num_free=20, num_ready=80)
    cluster.pools[full_far] = Pool(node=full_far, num_slots=100, num_free=10, num_ready=90)
    cluster.put(holder, 1)
    cluster.use(run_of(1), 5)
    assert [each.destination for each in cluster.orders()] == [far]
    del cluster.pools[far], cluster.pools[full_far]
    cluster.use(run_of(1))
    assert [each.destination for each in cluster.orders()] == [near], "else the same rack"


def test_two_nodes_of_one_machine_are_nearer_than_two_of_one_rack() -> None:
    labels = {
        NODES[0]: {"rack": "1", MACHINE: "m1"},
        NODES[1]: {"rack": "1", MACHINE: "m1"},
        NODES[2]: {"rack": "1", MACHINE: "m2"},
    }
    assert [nearness(node, NODES[:1], labels) for node in NODES[1:4]] == [4, 2, 0]


def test_a_pool_without_room_gets_nothing() -> None:
    cluster = Cluster(NODES[:2])
    cluster.put(NODES[0], *range(20))
    cluster.use(run_of(*range(20)), 5)
    cluster.pools[NODES[1]] = pool(NODES[1], free=0, ready=7)
    assert cluster.orders() == []
    cluster.use(run_of(*range(20)))
    cluster.pools[NODES[1]] = Pool(node=NODES[1], num_slots=100, num_free=100, num_ready=0, slot_bytes=MIB - 1)
    assert cluster.orders() == [], "its slots are too small"
    cluster.use(run_of(*range(20)))
    cluster.pools[NODES[1]] = pool(NODES[1], free=3, ready=80)
    assert [len(order.positions) for order in cluster.orders()] == [13], "the free ones, and an eighth of the idle ones"


def test_a_copy_goes_on_where_its_node_holds_the_beginning() -> None:
    cluster = Cluster(NODES)
    cluster.put(NODES[0], 1, 2, 3)
    cluster.put(NODES[1], 1)
    cluster.use(run_of(1, 2, 3), 5)
    (order,) = cluster.orders()
    assert (order.destination, order.positions) == (NODES[1], (1, 2))
    assert order.run.keys[0] == key(1)


def test_an_empty_node_is_given_so_many_bytes_a_second_and_others_get_the_rest() -> None:
    cluster = Cluster([NODES[0], NODES[1], NODES[2]], mib_per_s=4.0)
    empty, busy = NODES[1], NODES[2]
    cluster.pools[busy] = pool(busy, free=40)
    for number in range(100, 130):
        cluster.put(NODES[0], number)
    given_to: dict[NodeId, int] = {empty: 0, busy: 0}
    for second in range(6):
        cluster.now_s = 200.0 + second
        for number in range(100, 130):
            cluster.use(run_of(number), 5)
        orders = cluster.orders()
        for order in orders:
            given_to[order.destination] += len(order.positions)
        cluster.carry_out(orders)
        assert given_to[empty] <= 4 * (second + 1) + 1
    assert given_to[empty] >= 20
    assert given_to[busy] >= 20


def test_pinned_runs_have_two_copies_without_demand_and_no_more() -> None:
    cluster = Cluster(NODES)
    cluster.put(NODES[0], 1, 2)
    orders = cluster.orders([run_of(1, 2)])
    assert [order.positions for order in orders] == [(0, 1)]
    cluster.carry_out(orders)
    assert cluster.orders([run_of(1, 2)]) == []


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 12)), min_size=1, max_size=12),
    st.lists(st.tuples(st.sampled_from(NODES), st.integers(0, 5), st.integers(0, 6)), max_size=12),
    label_maps,
    st.dictionaries(st.sampled_from(NODES), st.tuples(st.integers(0, 10), st.integers(0, 10)), min_size=1),
)
def test_whatever_is_used_and_held(
    uses: list[tuple[int, int, int]],
    held: list[tuple[NodeId, int, int]],
    labels: dict[NodeId, dict[str, str]],
    room: dict[NodeId, tuple[int, int]],
) -> None:
    """Bound, source, room and prefix, for all orders."""
    cluster = Cluster([], labels)
    cluster.pools = {node: pool(node, free, ready, slots=20) for node, (free, ready) in room.items()}
    for node, prefix, length in held:
        cluster.put(node, *(100 * prefix + at for at in range(length)))
    for passes in range(4):
        for prefix, length, times in uses:
            cluster.use(run_of(*(100 * prefix + at for at in range(length))), times if passes == 0 else 1)
        orders = cluster.orders()
        for order in orders:
            target = cluster.pools[order.destination]
            assert 0 < len(order.positions) <= min(MAX_ORDER_CHUNKS, target.room)
            cluster.carry_out([order])
            for at in order.positions:
                (wanted,) = cluster.planner.wanted([order.run.keys[at]], cluster.now_s)
                assert len(cluster.held[order.run.keys[at]]) <= wanted <= LIMITS.max_copies
            for each in order.run.keys[: order.positions[-1] + 1]:
                assert order.destination in cluster.held[each]
        cluster.now_s += 30.0


def test_a_continuation_is_likely_after_enough_prompts_that_agree() -> None:
    seen = Continuations()
    system, common, end = key(1), key(2), key(3)
    for _ in range(8):
        seen.see([system, common, end])
    assert seen.likely(system, 0.9, 8) == []
    for _ in range(20):
        seen.see([system, common, end])
    assert seen.likely(system, 0.9, 8) == [common, end]
    assert seen.likely(system, 0.9, 1) == [common]
    for _ in range(4):
        seen.see([system])
    assert seen.likely(system, 0.9, 8) == [], "it ends there too often"
    assert seen.likely(common, 0.9, 8) == [end]
    assert seen.likely(key(9), 0.1, 8) == []


@given(st.lists(st.lists(st.integers(0, 20), unique=True, max_size=6), max_size=60), st.floats(0.1, 0.99))
def test_what_is_called_likely_followed_at_least_that_often(prompts: list[list[int]], confidence: float) -> None:
    seen, few = Continuations(), Continuations(max_prefixes=10)
    for prompt in prompts:
        seen.see([key(number) for number in prompt])
        few.see([key(number) for number in prompt])
        assert len(few) <= 10
    for number in range(20):
        for child in seen.likely(key(number), confidence, 1):
            num_prompts = sum(number in prompt for prompt in prompts)
            num_followed = sum((key(number), child) in pairwise(map(key, prompt)) for prompt in prompts)
            assert num_followed >= confidence * (num_prompts + 1)


def test_counts_stay_exact_over_any_time() -> None:
    demand = Demand(1.0)
    for at_s in range(0, 1000, 10):
        demand.use([key(1)], float(at_s))
    assert demand.uses([key(1)], 990.0)[0] == pytest.approx(1 / (1 - 2**-10))
    assert demand.uses([key(1)], 991.0)[0] == pytest.approx(0.5 / (1 - 2**-10))
    demand.use([key(2)], 1e7)
    assert demand.uses([key(1)], 1e7)[0] == 0.0
    assert demand.uses([key(2)], 1e7)[0] == 1.0
