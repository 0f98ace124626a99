"""What is hot in engines, as policies weigh it: nothing is computed or moved that is there already."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from halfmoon.conductor.planning import Decision
from halfmoon.scheduling.admission import admit
from halfmoon.scheduling.cluster import Cluster, WorkerLoad
from halfmoon.scheduling.contract import Ask, Candidates, Costs, Plan
from halfmoon.scheduling.estimates import Assumed
from halfmoon.scheduling.index import Match
from halfmoon.scheduling.policies import PolicyName, policy_named
from halfmoon.schemas.ids import NodeId, RequestId, WorkerId
from halfmoon.schemas.splits import Role
from support.conductors import CARD, MODEL

CHUNK = CARD.chunk_tokens
NODES = [NodeId(f"node-{letter}") for letter in "abcd"]
REMOTE = frozenset({NodeId("node-x")})
SLOW_NETWORK = Costs(estimates=Assumed(pull_bytes_per_s=1_000.0))
SLOWISH = Costs(estimates=Assumed(pull_bytes_per_s=4 * CHUNK * 64 / 0.03))
DEFAULT = Costs()


def worker(name: str, role: Role, node: str, **load: Any) -> WorkerLoad:
    fields = {"card": CARD, "max_requests": 16, "free_tokens": 4096, "total_tokens": 4096, **load}
    return WorkerLoad(worker=WorkerId(name), role=role, node=NodeId(node), **fields)


P1, P2 = worker("p1", Role.PREFILL, "node-a"), worker("p2", Role.PREFILL, "node-b")
D1, D2 = worker("d1", Role.DECODE, "node-c"), worker("d2", Role.DECODE, "node-d")


def ask(hot: dict[str, int], *, number: int = 0, num_tokens: int = 4 * CHUNK + 5, match: Match | None = None) -> Ask:
    return Ask(
        request_id=RequestId(f"req-{number}"),
        num_tokens=num_tokens,
        max_tokens=16,
        has_chunks=True,
        match=match or Match(),
        hot={WorkerId(name): count for name, count in hot.items()},
    )


def plan(asked: Ask, *workers: WorkerLoad, costs: Costs = DEFAULT, name: PolicyName = PolicyName.KV_CENTRIC) -> Plan:
    candidates = admit(MODEL, asked, cluster(*workers), costs)
    assert isinstance(candidates, Candidates), candidates
    return policy_named(name).rank(asked, candidates, costs, 0)


def cluster(*workers: WorkerLoad) -> Cluster:
    return Cluster(workers, dict.fromkeys([*NODES, *REMOTE], 1), {MODEL: CARD})


def test_the_prefill_worker_whose_engine_holds_the_prefix_is_taken_while_it_is_free() -> None:
    for number in range(20):
        first = plan(ask({"p2": 4}, number=number), P1, P2, D1).prefills[0]
        assert (first.worker.worker, first.num_hot, first.num_reused) == ("p2", 4, 0)
    busy = worker("p2", Role.PREFILL, "node-b", queued_tokens=4 * CHUNK + 1)
    assert plan(ask({"p2": 4}), P1, busy, D1).prefills[0].worker.worker == "p1"


def test_what_is_hot_is_neither_pulled_nor_computed() -> None:
    match = Match((REMOTE,) * 4)
    cold = plan(ask({}, match=match), P1, D1).prefills[0]
    assert (cold.num_reused, cold.num_pulled) == (4, 4)
    hot = plan(ask({"p1": 4}, match=match), P1, D1).prefills[0]
    assert (hot.num_reused, hot.num_pulled) == (0, 0)
    assert hot.cost_s < cold.cost_s
    # A pull is worth what lies behind the hot part only.
    part = plan(ask({"p1": 3}, match=match), P1, D1, costs=SLOWISH).prefills[0]
    assert (part.num_reused, part.num_pulled) == (0, 0)
    local = plan(ask({"p1": 2}, match=Match((frozenset({P1.node}),) * 3)), P1, D1).prefills[0]
    assert (local.num_reused, local.num_pulled, local.num_hot) == (3, 0, 2)


def test_decode_goes_where_less_has_to_be_moved() -> None:
    for number in range(20):
        first = plan(ask({"d2": 2}, number=number), P1, D1, D2, costs=SLOW_NETWORK).decodes[0]
        assert (first.worker.worker, first.num_hot, first.is_alone) == ("d2", 2, False)


def test_decode_with_all_whole_chunks_hot_does_without_prefill() -> None:
    for num_tokens in (4 * CHUNK, 4 * CHUNK + 1, 5 * CHUNK - 1):
        first = plan(ask({"d2": 4}, num_tokens=num_tokens), P1, P2, D1, D2).decodes[0]
        assert (first.worker.worker, first.is_alone, first.needs_prefill) == ("d2", True, False)
    assert all(choice.needs_prefill for choice in plan(ask({"d2": 3}), P1, D1, D2).decodes)
    assert "all 4 chunks are hot at d2" in plan(ask({"d2": 4}), P1, D1, D2).reason


def test_decode_leaves_to_prefill_what_prefill_does_sooner() -> None:
    """Prefill has it hot too, and computes prompts a thousand times as fast."""
    fast = worker("p1", Role.PREFILL, "node-c", prefill_tokens_per_s=1e6)
    slow = worker("d1", Role.DECODE, "node-c", prefill_tokens_per_s=1e3)
    assert plan(ask({"p1": 4, "d1": 4}, num_tokens=5 * CHUNK - 1), fast, slow).decodes[0].needs_prefill
    far = worker("d1", Role.DECODE, "node-d", prefill_tokens_per_s=1e3)
    choice = plan(ask({"p1": 4, "d1": 4}, num_tokens=5 * CHUNK - 1), fast, far, costs=SLOW_NETWORK).decodes[0]
    assert not choice.needs_prefill


def test_decode_is_left_alone_only_where_it_begins_at_once() -> None:
    """What waits finds the cache as others have left it."""
    waiting = worker("d1", Role.DECODE, "node-c", num_waiting=1)
    full = worker("d1", Role.DECODE, "node-c", free_tokens=4 * CHUNK)
    for there in (waiting, full):
        assert plan(ask({"d1": 4}), P1, there).decodes[0].needs_prefill


def test_a_full_decode_worker_is_passed_by_whatever_is_hot_there() -> None:
    full = worker("d1", Role.DECODE, "node-c", num_requests=16, free_tokens=10)
    assert plan(ask({"d1": 4}), P1, full, D2).decodes[0].worker.worker == "d2"


def test_a_prefix_that_all_share_does_not_draw_all_load_to_the_one_engine_that_has_it() -> None:
    queued = {f"p{at}": 0 for at in range(4)}
    for number in range(400):
        workers = [worker(f"p{at}", Role.PREFILL, NODES[at], queued_tokens=queued[f"p{at}"]) for at in range(4)]
        choice = plan(ask({"p0": 1}, number=number, num_tokens=8 * CHUNK), *workers, D1).prefills[0]
        queued[choice.worker.worker] += 8 * CHUNK - choice.num_hot * CHUNK
    assert max(queued.values()) / (sum(queued.values()) / 4) < 1.15


def test_hits_are_counted_by_tier_where_the_first_choice_finds_them() -> None:
    match = Match((frozenset({P1.node}), frozenset({P1.node}), REMOTE, REMOTE))

    def hits(asked: Ask, *workers: WorkerLoad) -> dict[str, int]:
        return dict(Decision(plan(asked, *workers), cluster(*workers), asked, b"").hits())

    assert hits(ask({}, match=match), P1, D1) == {"local": 2, "remote": 2}
    assert hits(ask({"p1": 1}, match=match), P1, D1) == {"hbm": 1, "local": 1, "remote": 2}
    assert hits(ask({"d1": 4}, match=match), P1, D1) == {"hbm": 4}
    colocated = worker("c1", Role.COLOCATED, "node-a")
    assert hits(ask({"c1": 1}, match=match), colocated) == {"hbm": 1, "local": 1, "remote": 2}


hot_counts = st.dictionaries(st.sampled_from(["p0", "p1", "d0", "d1"]), st.integers(0, 4))
holders = st.lists(st.frozensets(st.sampled_from(NODES), min_size=1), max_size=4).map(lambda sets: Match(tuple(sets)))


@given(
    hot=hot_counts,
    match=holders,
    num_tokens=st.integers(4 * CHUNK, 5 * CHUNK - 1),
    pull_bytes_per_s=st.sampled_from([1e3, 1e5, 1e9]),
    queued=st.lists(st.integers(0, 500), min_size=4, max_size=4),
    name=st.sampled_from(PolicyName),
)
def test_every_policy_promises_only_what_is_there(
    hot: dict[str, int],
    match: Match,
    num_tokens: int,
    pull_bytes_per_s: float,
    queued: list[int],
    name: PolicyName,
) -> None:
    asked = ask(hot, num_tokens=num_tokens, match=match)
    workers = [
        worker(each, Role.PREFILL if each[0] == "p" else Role.DECODE, node, queued_tokens=tokens)
        for each, node, tokens in zip(("p0", "p1", "d0", "d1"), NODES, queued, strict=True)
    ]
    made = plan(asked, *workers, costs=Costs(estimates=Assumed(pull_bytes_per_s=pull_bytes_per_s)), name=name)
    assert {choice.worker.worker for choice in made.prefills} == {"p0", "p1"}
    assert {choice.worker.worker for choice in made.decodes} == {"d0", "d1"}
    for prefill in made.prefills:
        assert prefill.num_hot == hot.get(prefill.worker.worker, 0)
        assert len(Decision(made, cluster(*workers), asked, b"").sources(prefill)) == prefill.num_reused
        if prefill.num_hot >= len(match):
            assert prefill.num_pulled == 0
    for decode in made.decodes:
        assert decode.num_hot == hot.get(decode.worker.worker, 0)
        assert not decode.is_alone or decode.num_hot == num_tokens // CHUNK
