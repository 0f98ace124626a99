"""Who gets a request: admission's errors, and what a policy must never do."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.scheduling.admission import admit, check_tokens, max_tokens
from halfmoon.scheduling.cluster import Cluster, WorkerLoad
from halfmoon.scheduling.contract import Ask, Candidates, Costs
from halfmoon.scheduling.estimates import Assumed
from halfmoon.scheduling.index import Match
from halfmoon.scheduling.policies import PolicyName, policy_named
from halfmoon.scheduling.prefix import CachedPrefix
from halfmoon.schemas.ids import ModelName, NodeId, RequestId, WorkerId
from halfmoon.schemas.splits import Role
from halfmoon.schemas.wire import Error, ErrorCode
from support.conductors import CARD, MODEL

COSTS = Costs(num_choices=10)
NODES = [NodeId(f"node-{letter}") for letter in "abcd"]


def worker(name: str, role: Role, node: str, **load: Any) -> WorkerLoad:
    fields = {"card": CARD, "max_requests": 16, "free_tokens": 4096, "total_tokens": 4096, **load}
    return WorkerLoad(worker=WorkerId(name), role=role, node=NodeId(node), **fields)


def cluster(*workers: WorkerLoad) -> Cluster:
    return Cluster(workers, dict.fromkeys(NODES, 1), {each.card.name: each.card for each in workers})


def ask(number: int = 0, *, num_tokens: int = 64, match: Match | None = None) -> Ask:
    return Ask(
        request_id=RequestId(f"req-{number}"),
        num_tokens=num_tokens,
        max_tokens=16,
        has_chunks=num_tokens > 1,
        match=match or Match(),
    )


def admitted(asked: Ask, there: Cluster) -> Candidates:
    candidates = admit(MODEL, asked, there, COSTS)
    assert isinstance(candidates, Candidates), candidates
    return candidates


def refused(asked: Ask, there: Cluster, model: ModelName = MODEL) -> Error:
    error = admit(model, asked, there, COSTS)
    assert isinstance(error, Error)
    return error


PREFILL = worker("p1", Role.PREFILL, "node-a")
DECODE = worker("d1", Role.DECODE, "node-b")
COLOCATED = worker("c1", Role.COLOCATED, "node-c")


def test_a_pair_is_admitted() -> None:
    assert admitted(ask(), cluster(PREFILL, DECODE)) == Candidates(CARD, (PREFILL,), (DECODE,))


def test_a_colocated_worker_needs_nobody_else() -> None:
    assert admitted(ask(), cluster(COLOCATED)).decodes == (COLOCATED,)
    assert admitted(ask(), cluster(COLOCATED, DECODE)).decodes == (COLOCATED,)


def test_decode_alone_serves_what_needs_no_prefill() -> None:
    assert admitted(ask(num_tokens=1), cluster(DECODE)).decodes == (DECODE,)


@pytest.mark.parametrize(("workers", "missing"), [((DECODE,), "prefill"), ((PREFILL,), "decode")])
def test_what_is_missing_is_named(workers: tuple[WorkerLoad, ...], missing: str) -> None:
    error = refused(ask(), cluster(*workers))
    assert error.code is ErrorCode.NO_WORKERS
    assert missing in error.message


def test_a_model_that_is_away_is_told_from_an_unknown_one() -> None:
    gone = Cluster((), {}, {MODEL: CARD})
    assert refused(ask(), gone).code is ErrorCode.NO_WORKERS
    error = refused(ask(), gone, ModelName("other"))
    assert error.code is ErrorCode.MODEL_NOT_FOUND
    assert repr(MODEL) in error.message
    assert refused(ask(), Cluster((), {}, {})).code is ErrorCode.NO_WORKERS


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fingerprint", "e" * 64),
        ("kv_dtype", "float16"),
        ("layout", "other.v1"),
        ("chunk_tokens", 32),
        ("kv_bytes_per_token", 32),
    ],
)
def test_those_that_would_disagree_about_kv_are_never_paired(field: str, value: str | int) -> None:
    other = msgspec.structs.replace(CARD, **{field: value})
    assert (
        refused(ask(), cluster(PREFILL, worker("d1", Role.DECODE, "node-b", card=other))).code is ErrorCode.NO_WORKERS
    )


@given(num_tokens=st.integers(1, 400), own_kv=st.integers(1, 400))
def test_a_prompt_is_too_long_exactly_when_no_token_of_completion_fits(num_tokens: int, own_kv: int) -> None:
    there = cluster(
        worker("p1", Role.PREFILL, "node-a"),
        worker("d1", Role.DECODE, "node-b", total_tokens=own_kv, free_tokens=own_kv),
    )
    limit = min(CARD.max_model_tokens, own_kv)
    outcome = admit(MODEL, ask(num_tokens=num_tokens), there, COSTS)
    if num_tokens < limit:
        assert isinstance(outcome, Candidates)
        assert 1 <= max_tokens(10_000, num_tokens, limit) == limit - num_tokens
    else:
        assert isinstance(outcome, Error)
        assert outcome.code is ErrorCode.PROMPT_TOO_LONG
    assert max_tokens(1, num_tokens, num_tokens + 5) == 1


def test_full_queues_are_overload_with_a_time_to_come_back() -> None:
    full = worker("p1", Role.PREFILL, "node-a", num_waiting=COSTS.max_waiting_per_worker)
    error = refused(ask(), cluster(full, DECODE))
    assert error.code is ErrorCode.OVERLOADED
    assert error.retry_after_s == COSTS.retry_after_s
    assert admitted(ask(), cluster(full, PREFILL, DECODE)).prefills == (PREFILL,)


@pytest.mark.parametrize("tokens", [(), (1000,), (-1,), (1, 2, 2**40)])
def test_tokens_outside_the_vocabulary_are_refused(tokens: tuple[int, ...]) -> None:
    error = check_tokens(tokens, CARD)
    assert error is not None
    assert error.code is ErrorCode.INVALID_REQUEST
    assert check_tokens((0, 999), CARD) is None


loads = st.fixed_dictionaries(
    {
        "num_requests": st.integers(0, 40),
        "queued_tokens": st.integers(0, 5000),
        "free_tokens": st.integers(0, 4096),
    }
)
holders = st.lists(st.frozensets(st.sampled_from(NODES), min_size=1), max_size=4).map(lambda sets: Match(tuple(sets)))


@given(
    prefills=st.lists(st.tuples(st.sampled_from(NODES), loads), min_size=1, max_size=5),
    decodes=st.lists(st.tuples(st.sampled_from(NODES), loads, st.booleans()), min_size=1, max_size=5),
    match=holders,
    turn=st.integers(0, 100),
    name=st.sampled_from(PolicyName),
)
def test_every_policy_keeps_all_candidates_and_promises_only_what_is_there(
    prefills: list[tuple[NodeId, dict[str, int]]],
    decodes: list[tuple[NodeId, dict[str, int], bool]],
    match: Match,
    turn: int,
    name: PolicyName,
) -> None:
    there = cluster(
        *(worker(f"p{at}", Role.PREFILL, node, **load) for at, (node, load) in enumerate(prefills)),
        *(
            worker(f"d{at}", Role.COLOCATED if both else Role.DECODE, node, **load)
            for at, (node, load, both) in enumerate(decodes)
        ),
    )
    asked = ask(match=match)
    candidates = admitted(asked, there)
    plan = policy_named(name).rank(asked, candidates, COSTS, turn)
    assert {choice.worker.worker for choice in plan.prefills} == {each.worker for each in candidates.prefills}
    assert {choice.worker.worker for choice in plan.decodes} == {each.worker for each in candidates.decodes}
    assert plan == policy_named(name).rank(asked, candidates, COSTS, turn)
    for choice in plan.prefills:
        prefix = CachedPrefix(match, 1024, COSTS.estimates, asked.request_id)
        where = prefix.sources(choice.num_reused, choice.worker.node, there.nodes)
        assert choice.num_reused == len(where) <= len(match)
        assert all(named for named in where)
        for at, named in enumerate(where):
            if choice.worker.node in match.holders[at]:
                assert named[0].node == choice.worker.node
            assert {source.node for source in named} <= match.holders[at]
        if choice.num_pulled == 0:
            assert all(choice.worker.node in nodes for nodes in match.holders[: choice.num_reused])


def test_the_node_that_holds_the_prefix_is_taken_when_it_is_free() -> None:
    slow_network = Costs(estimates=Assumed(pull_bytes_per_s=1_000.0))
    there = cluster(PREFILL, worker("p2", Role.PREFILL, "node-d"), DECODE)
    for number in range(20):
        asked = ask(number, match=Match((frozenset({NodeId("node-d")}),) * 4))
        plan = policy_named(PolicyName.KV_CENTRIC).rank(asked, admitted(asked, there), slow_network, number)
        assert plan.prefills[0].worker.worker == "p2"
        assert (plan.prefills[0].num_reused, plan.prefills[1].num_reused) == (4, 0)


def test_a_remote_prefix_is_pulled_only_where_that_is_quicker_than_computing() -> None:
    asked = ask(match=Match((frozenset({NodeId("node-d")}),) * 4))
    there = cluster(PREFILL, DECODE)
    policy = policy_named(PolicyName.KV_CENTRIC)
    quick = policy.rank(asked, admitted(asked, there), Costs(estimates=Assumed(pull_bytes_per_s=1e9)), 0).prefills[0]
    slow = policy.rank(asked, admitted(asked, there), Costs(estimates=Assumed(pull_bytes_per_s=1e3)), 0).prefills[0]
    assert (quick.num_reused, quick.num_pulled) == (4, 4)
    assert (slow.num_reused, slow.num_pulled) == (0, 0)


@pytest.mark.parametrize("pull_bytes_per_s", [1e9, 1e3])
@pytest.mark.parametrize("name", list(PolicyName))
def test_a_first_chunk_that_all_share_does_not_draw_all_load_to_one_node(
    name: PolicyName, pull_bytes_per_s: float
) -> None:
    """Eight chunks a prompt, the first of them on node-a for everybody; nothing ends meanwhile."""
    costs = Costs(estimates=Assumed(pull_bytes_per_s=pull_bytes_per_s))
    queued = {f"p{at}": 0 for at in range(4)}
    placed = dict.fromkeys(queued, 0)
    match = Match((frozenset({NODES[0]}),))
    for number in range(400):
        there = cluster(
            *(worker(f"p{at}", Role.PREFILL, NODES[at], queued_tokens=queued[f"p{at}"]) for at in range(4)), DECODE
        )
        asked = ask(number, num_tokens=128, match=match)
        choice = policy_named(name).rank(asked, admitted(asked, there), costs, number).prefills[0]
        queued[choice.worker.worker] += 128 - 16 * choice.num_reused
        placed[choice.worker.worker] += 1
    mean = sum(queued.values()) / len(queued)
    assert max(queued.values()) / mean < 1.15
    assert min(placed.values()) > 0


def test_decode_goes_where_there_is_room() -> None:
    full = worker("d1", Role.DECODE, "node-a", num_requests=16, free_tokens=10)
    free = worker("d2", Role.DECODE, "node-b")
    for number in range(20):
        asked = ask(number)
        candidates = admitted(asked, cluster(PREFILL, full, free))
        plan = policy_named(PolicyName.KV_CENTRIC).rank(asked, candidates, COSTS, number)
        assert plan.decodes[0].worker.worker == "d2"


def test_equals_are_drawn_by_lot_and_the_same_by_everybody() -> None:
    there = cluster(*(worker(f"p{at}", Role.PREFILL, NODES[at]) for at in range(4)), DECODE)
    policy = policy_named(PolicyName.KV_CENTRIC)
    first = [
        policy.rank(ask(number), admitted(ask(number), there), COSTS, turn).prefills[0].worker.worker
        for number in range(100)
        for turn in (0, 7)
    ]
    assert first[::2] == first[1::2]
    assert set(first) == {"p0", "p1", "p2", "p3"}
