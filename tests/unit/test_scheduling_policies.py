"""KV-centric scheduling: when a prefix moves, where it goes, and that it never draws all load to one place."""

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.scheduling.cluster import WorkerLoad
from halfmoon.scheduling.contract import Ask, Candidates, Costs, Plan, Policy, Replication
from halfmoon.scheduling.estimates import Assumed
from halfmoon.scheduling.index import Match
from halfmoon.scheduling.policies import Balance, KvCentric, PolicyName, policy_named
from halfmoon.scheduling.policies.balance import FIRST_THRESHOLD, MAX_THRESHOLD, MIN_THRESHOLD
from halfmoon.schemas.ids import NodeId, RequestId, WorkerId
from halfmoon.schemas.splits import Role
from support.conductors import CARD

CHUNK = CARD.chunk_tokens
CHUNK_S = CHUNK / 2_000
"""To compute a chunk, at the assumed speed."""
CHUNK_BYTES = CARD.payload_bytes(CHUNK)
NODES = [NodeId(f"node-{at}") for at in range(8)]


def prefill(at: int, **load: Any) -> WorkerLoad:
    return WorkerLoad(worker=WorkerId(f"p{at}"), role=Role.PREFILL, node=NODES[at], card=CARD, max_requests=16, **load)


def decode(at: int, **load: Any) -> WorkerLoad:
    return WorkerLoad(worker=WorkerId(f"d{at}"), role=Role.DECODE, node=NODES[at], card=CARD, max_requests=16, **load)


def ask(number: int = 0, *, num_chunks: int = 8, match: Match | None = None) -> Ask:
    return Ask(
        request_id=RequestId(f"req-{number}"),
        num_tokens=num_chunks * CHUNK,
        max_tokens=16,
        has_chunks=True,
        match=match or Match(),
    )


def on(*nodes: int, num_chunks: int) -> Match:
    return Match((frozenset(NODES[at] for at in nodes),) * num_chunks)


def rank(
    asked: Ask,
    prefills: list[WorkerLoad],
    decodes: list[WorkerLoad] | None = None,
    *,
    costs: Costs | None = None,
    policy: Policy | None = None,
    turn: int = 0,
) -> Plan:
    candidates = Candidates(CARD, tuple(prefills), tuple(decodes or [decode(7)]))
    return (policy or KvCentric()).rank(asked, candidates, costs or Costs(), turn)


def pulling(bytes_per_s: float) -> Costs:
    return Costs(estimates=Assumed(pull_bytes_per_s=bytes_per_s))


def test_with_nothing_at_hand_any_match_may_be_pulled() -> None:
    """The ratio of best to local match has no bound there; nothing is divided by zero."""
    only = rank(ask(match=on(3, num_chunks=1)), [prefill(0)]).prefills[0]
    assert (only.num_reused, only.num_pulled) == (1, 1)
    nothing = rank(ask(), [prefill(0)]).prefills[0]
    assert (nothing.num_reused, nothing.num_pulled) == (0, 0)


@pytest.mark.parametrize(("threshold", "pulled"), [(1.9, 4), (2.1, 0)])
def test_a_match_is_pulled_only_where_it_is_longer_by_the_threshold(threshold: float, pulled: int) -> None:
    match = Match((frozenset({NODES[0], NODES[3]}),) * 4 + (frozenset({NODES[3]}),) * 4)
    choice = rank(ask(match=match), [prefill(0)], policy=KvCentric(Balance(threshold))).prefills[0]
    assert choice.num_pulled == pulled
    assert choice.num_reused == 4 + pulled


@pytest.mark.parametrize(("share", "pulled"), [(0.9, 8), (1.1, 0)])
def test_pulling_must_be_quicker_than_computing(share: float, pulled: int) -> None:
    costs = pulling(CHUNK_BYTES / (share * CHUNK_S))
    choice = rank(ask(match=on(3, num_chunks=8)), [prefill(0)], costs=costs).prefills[0]
    assert choice.num_pulled == pulled


def test_the_holder_is_passed_when_its_queue_costs_more_than_the_pull() -> None:
    costs = pulling(CHUNK_BYTES / (0.25 * CHUNK_S))  # 8 chunks: the time to compute two
    match = on(3, num_chunks=8)
    for queued, first in ((1, "p3"), (3, "p0")):
        plan = rank(ask(match=match), [prefill(0), prefill(3, queued_tokens=queued * CHUNK)], costs=costs)
        assert plan.prefills[0].worker.worker == first


def test_an_overloaded_holder_that_is_chosen_all_the_same_has_its_prefix_copied() -> None:
    """Whoever pulls or computes has a copy afterwards; where the holder itself is the quickest, nobody would have."""
    costs = pulling(CHUNK_BYTES / (0.5 * CHUNK_S))
    asked = ask(num_chunks=80, match=on(3, num_chunks=80))  # 80 chunks: 0.32 s to pull, 0.64 s to compute
    idle = [prefill(at) for at in range(3)]
    for queued, copied in ((120, False), (600, True)):
        plan = rank(asked, [*idle, prefill(3, queued_tokens=queued)], costs=costs)
        assert plan.prefills[0].worker.worker == "p3"
        assert plan.replication == (Replication(NODES[3], NODES[0], 80) if copied else None)
    assert rank(asked, [*idle, prefill(3, queued_tokens=800)], costs=costs).prefills[0].num_pulled == 80
    # A pull that takes longer than computing is no way to a copy.
    slow = pulling(CHUNK_BYTES / (1.1 * CHUNK_S))
    assert rank(asked, [*idle, prefill(3, queued_tokens=600)], costs=slow).replication is None


def test_who_decodes_is_who_would_end_first() -> None:
    costs = Costs(estimates=Assumed(decode_step_s=0.05, batch_share=0.2))
    busy, idle = decode(0, num_requests=8), decode(1, num_requests=1)
    plan = rank(ask(), [prefill(0)], [busy, idle], costs=costs)
    assert plan.decodes[0].worker.worker == "d1"
    assert plan.decodes[0].tbt_s == pytest.approx(0.05 * 1.2)
    assert plan.decodes[0].ttft_s == pytest.approx(plan.prefills[0].cost_s + 8 * CHUNK * 64 / 1e9 + 0.06)


class _Racks(Assumed):
    """Nodes with even numbers are in one rack."""

    def distance(self, one: NodeId, other: NodeId) -> int:
        return 0 if one == other else 2 if (int(one[-1]) - int(other[-1])) % 2 == 0 else 4


def test_equals_go_to_the_nearer_node() -> None:
    costs = Costs(estimates=_Racks())
    for number in range(20):
        plan = rank(
            ask(number, match=on(0, num_chunks=8)),
            [prefill(1), prefill(2)],
            [decode(3), decode(4), decode(5)],
            costs=costs,
        )
        assert plan.prefills[0].worker.worker == "p2"
        assert plan.decodes[0].worker.worker == "d4"


def test_the_threshold_falls_while_queues_are_uneven_and_rises_while_they_are_even() -> None:
    balance = Balance()
    for _ in range(300):
        balance.observe([4.0, 0.1, 0.1, 0.1])
    assert balance.threshold == MIN_THRESHOLD
    assert balance.imbalance == pytest.approx(4.0 / (4.3 / 4), rel=0.01)
    for _ in range(400):
        balance.observe([1.0, 1.1, 0.9, 1.0])
    assert balance.threshold == MAX_THRESHOLD
    fixed = Balance(2.0)
    for _ in range(100):
        fixed.observe([4.0, 0.0])
    assert fixed.threshold == 2.0
    idle = Balance()
    idle.observe([0.01, 0.0])
    idle.observe([])
    assert (idle.threshold, idle.imbalance) == (FIRST_THRESHOLD, 1.0)
    with pytest.raises(ValueError, match=r"at least 1, got 0\.5"):
        Balance(0.5)


@pytest.mark.parametrize("name", list(PolicyName))
def test_a_first_chunk_that_all_share_still_spreads_the_load(name: PolicyName) -> None:
    """Half of each prompt is cached where its first half was computed before, and chunk 0 is the same for all. Queues
    drain at a tenth of what comes in: only spreading helps."""
    policy = policy_named(name)
    draw = random.Random(4)
    queued = [0.0] * 8
    placed: Counter[int] = Counter()
    holders: dict[int, set[int]] = {}
    shared = {0}
    for number in range(600):
        talk = draw.randrange(60)
        match = Match(
            (frozenset(NODES[at] for at in shared),)
            + (frozenset(NODES[at] for at in holders.get(talk, ())),) * (3 if talk in holders else 0)
        )
        workers = [prefill(at, queued_tokens=int(queued[at])) for at in range(8)]
        choice = rank(ask(number, match=match), workers, policy=policy, turn=number).prefills[0]
        at = int(choice.worker.worker[1:])
        queued[at] += (8 - max(choice.num_reused, choice.num_hot)) * CHUNK
        queued = [each * 0.99 for each in queued]
        placed[at] += 1
        holders.setdefault(talk, set()).add(at)
        shared.add(at)
    assert max(placed.values()) / (600 / 8) < (1.6 if name is PolicyName.RANDOM else 1.35)


@pytest.mark.parametrize("name", [PolicyName.KV_CENTRIC, PolicyName.PREFIX_AFFINITY, PolicyName.LEAST_LOADED])
def test_a_node_that_comes_up_empty_is_not_flooded(name: PolicyName) -> None:
    """Seven nodes are in even use and hold everything; the eighth is idle and holds nothing. It gets its share until it
    is as busy as they are, and no more."""
    policy = policy_named(name)
    queued = [4.0 * 8 * CHUNK] * 7 + [0.0]
    got = []
    for number in range(200):
        workers = [prefill(at, queued_tokens=int(queued[at])) for at in range(8)]
        match = on(*range(7), num_chunks=6)
        choice = rank(ask(number, match=match), workers, policy=policy, turn=number).prefills[0]
        at = int(choice.worker.worker[1:])
        queued[at] += (8 - choice.num_reused) * CHUNK
        got.append(at)
        mean = sum(queued) / 8
        assert queued[7] <= mean + 8 * CHUNK
    assert 200 / 8 / 4 < got.count(7) < 200 / 8 * 4


def test_a_stale_entry_costs_a_plan_no_more_than_its_pull() -> None:
    """The index names a node that has evicted the chunks: the estimate was too good by what has to be computed, and
    another source, or computing, is what is left. Nothing else depends on it."""
    match = on(3, num_chunks=4)
    promised = rank(ask(match=match), [prefill(0)]).prefills[0]
    without = rank(ask(), [prefill(0)]).prefills[0]
    assert promised.num_reused == 4
    assert without.cost_s - promised.cost_s <= 4 * CHUNK_S


loads = st.fixed_dictionaries(
    {
        "num_requests": st.integers(0, 20),
        "num_waiting": st.integers(0, 3),
        "queued_tokens": st.integers(0, 400),
        "free_tokens": st.integers(0, 400),
        "total_tokens": st.just(400),
        "context_tokens": st.integers(0, 5_000),
    }
)


@given(
    prefills=st.lists(loads, min_size=1, max_size=8),
    decodes=st.lists(loads, min_size=1, max_size=8),
    runs=st.lists(st.tuples(st.frozensets(st.sampled_from(NODES), min_size=1), st.integers(1, 4)), max_size=3),
    hot=st.dictionaries(st.sampled_from([f"{side}{at}" for side in "pd" for at in range(8)]), st.integers(1, 8)),
    pull_bytes_per_s=st.sampled_from([1e3, 1e5, 1e7]),
    name=st.sampled_from([PolicyName.KV_CENTRIC, PolicyName.PREFIX_AFFINITY, PolicyName.LEAST_LOADED]),
)
def test_looking_closely_at_a_few_finds_the_same_as_looking_at_all(
    prefills: list[dict[str, int]],
    decodes: list[dict[str, int]],
    runs: list[tuple[frozenset[NodeId], int]],
    hot: dict[str, int],
    pull_bytes_per_s: float,
    name: PolicyName,
) -> None:
    match = Match(tuple(nodes for nodes, count in runs for _ in range(count)))
    asked = Ask(
        request_id=RequestId("req"),
        num_tokens=13 * CHUNK,
        max_tokens=16,
        has_chunks=True,
        match=match,
        hot={WorkerId(worker): count for worker, count in hot.items()},
    )
    candidates = Candidates(
        CARD,
        tuple(prefill(at, **load) for at, load in enumerate(prefills)),
        tuple(decode(at, **load) for at, load in enumerate(decodes)),
    )
    estimates = Assumed(pull_bytes_per_s=pull_bytes_per_s)
    few = policy_named(name).rank(asked, candidates, Costs(estimates=estimates, num_choices=2), 0)
    all_of_them = policy_named(name).rank(asked, candidates, Costs(estimates=estimates, num_choices=100), 0)
    assert few.prefills == all_of_them.prefills[:2]
    assert few.decodes == all_of_them.decodes[:2]
    assert list(all_of_them.prefills) == sorted(all_of_them.prefills, key=lambda choice: choice.cost_s) or (
        name is PolicyName.LEAST_LOADED
    )
    assert few.replication == all_of_them.replication
    assert few.replication is None or isinstance(few.replication, Replication)
