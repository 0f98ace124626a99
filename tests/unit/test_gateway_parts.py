"""The gateway's pure parts: life cycle, membership, verdict, keys, seeds, limits."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.gateway import policy
from halfmoon.gateway.auth import tenant_of
from halfmoon.gateway.cluster import Cluster, Serving
from halfmoon.gateway.config import GatewayConfig
from halfmoon.gateway.errors import ApiError, from_wire
from halfmoon.gateway.readiness import Verdict
from halfmoon.gateway.rendering import usage_of
from halfmoon.gateway.state import LIFE, TERMINAL, Phase, Sign
from halfmoon.machine import IllegalTransition, Machine
from halfmoon.schemas.ids import ModelName, NodeId, RequestId, TenantId, WorkerId
from halfmoon.schemas.members import MEMBER_LOST_AFTER_S, Goodbye, MemberState, ServiceHeartbeat, WorkerHeartbeat
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.requests import Sampling, Usage
from halfmoon.schemas.splits import Role
from halfmoon.schemas.wire import Error, ErrorCode

MODEL = ModelName("tiny")
CARD = ModelCard(
    name=MODEL,
    engine="sim",
    fingerprint="ab",
    kv_dtype="float32",
    layout="x",
    kv_bytes_per_token=1,
    chunk_tokens=16,
    max_model_tokens=100,
    vocab_size=50,
)


@pytest.mark.parametrize(("phase", "sign"), list(itertools.product(Phase, Sign)))
def test_each_transition_is_in_the_table_or_refused(phase: Phase, sign: Sign) -> None:
    machine = Machine(LIFE, phase)
    if (phase, sign) in LIFE:
        assert machine.fire(sign) is LIFE[phase, sign]
        return
    with pytest.raises(IllegalTransition):
        machine.fire(sign)
    assert machine.state is phase


def test_every_phase_is_reached_and_only_terminal_ones_end() -> None:
    assert {*LIFE.values(), Phase.CHECKING} == set(Phase)
    assert {phase for phase, _ in LIFE} == set(Phase) - TERMINAL


def _worker(role: Role, name: str = "w", life: int = 1, state: MemberState = MemberState.SERVING) -> WorkerHeartbeat:
    return WorkerHeartbeat(
        worker=WorkerId(f"{role}-{name}"),
        role=role,
        node=NodeId("n"),
        started_ns=life,
        state=state,
        card=None if state is MemberState.LOADING else CARD,
    )


def _conductor() -> ServiceHeartbeat:
    return ServiceHeartbeat(worker=WorkerId("conductor"), service="conductor", started_ns=1, state=MemberState.SERVING)


def test_what_is_missing_is_named() -> None:
    cluster = Cluster()
    assert cluster.serving(MODEL).missing == ("conductor", "prefill worker", "decode worker")
    cluster.hear(_conductor(), 0.0)
    cluster.hear(_worker(Role.PREFILL, state=MemberState.LOADING), 0.0)
    assert cluster.serving(MODEL).missing == ("prefill worker (loading)", "decode worker")
    cluster.hear(_worker(Role.PREFILL), 0.0)
    cluster.hear(_worker(Role.DECODE, state=MemberState.DRAINING), 0.0)
    assert cluster.serving(MODEL).missing == ("decode worker",)
    cluster.hear(_worker(Role.DECODE), 0.0)
    serving = cluster.serving(MODEL)
    assert serving.missing == ()
    assert serving.card == CARD
    assert len(serving.members) == 3
    assert cluster.serving(ModelName("other")).missing == ("prefill worker", "decode worker")


def test_one_worker_of_both_halves_is_enough() -> None:
    cluster = Cluster()
    cluster.hear(_conductor(), 0.0)
    cluster.hear(_worker(Role.COLOCATED), 0.0)
    assert cluster.serving(MODEL).missing == ()


def test_the_silent_and_the_gone_are_forgotten() -> None:
    cluster = Cluster()
    for heartbeat in (_conductor(), _worker(Role.PREFILL), _worker(Role.DECODE)):
        cluster.hear(heartbeat, 0.0)
    now_s = 0.0
    while now_s < MEMBER_LOST_AFTER_S:
        assert cluster.serving(MODEL).missing == ()
        now_s += 0.5
        cluster.hear(_conductor(), now_s)
        cluster.hear(_worker(Role.DECODE), now_s)
    cluster.hear(_conductor(), now_s + 0.5)
    assert cluster.serving(MODEL).missing == ("prefill worker",)
    cluster.hear(Goodbye(worker=WorkerId("conductor")), now_s + 0.5)
    assert cluster.serving(MODEL).missing == ("conductor", "prefill worker")


def test_while_nobody_at_all_is_heard_nobody_is_forgotten() -> None:
    cluster = Cluster()
    for heartbeat in (_conductor(), _worker(Role.PREFILL), _worker(Role.DECODE)):
        cluster.hear(heartbeat, 0.0)
    # The broker stood still; whoever is heard first again, the others have the time that they had before.
    cluster.hear(_conductor(), 60.0)
    assert cluster.serving(MODEL).missing == ()
    for now_s in (60.9, 61.8):
        cluster.hear(_conductor(), now_s)
        assert cluster.serving(MODEL).missing == ()
    cluster.hear(_conductor(), 62.7)
    assert cluster.serving(MODEL).missing == ("prefill worker", "decode worker")


def _serving(*members: tuple[str, int], missing: tuple[str, ...] = ()) -> Serving:
    return Serving(card=CARD, missing=missing, members=frozenset((WorkerId(name), life) for name, life in members))


def test_a_verdict_needs_a_proof_and_loses_it() -> None:
    verdict = Verdict()
    assert not verdict.ready
    assert not verdict.see(_serving(missing=("conductor",)))
    both = _serving(("p", 1), ("d", 1))
    assert verdict.see(both)
    assert not verdict.ready
    verdict.passed(both.members, 0.1)
    assert verdict.ready
    assert not verdict.see(both)
    # One more is no reason to doubt, nor is one less as long as the kind is there.
    assert not verdict.see(_serving(("p", 1), ("d", 1), ("d2", 1)))
    assert not verdict.see(_serving(("p", 1), ("d2", 1))) or verdict.ready
    # Another life of a worker is tried, while the service goes on.
    assert verdict.see(_serving(("p", 2), ("d", 1)))
    assert verdict.ready
    verdict.failed("why")
    assert not verdict.ready
    assert "why" in verdict.detail
    verdict.passed(both.members, 0.1)
    verdict.see(_serving(("p", 1), missing=("decode worker",)))
    assert not verdict.ready
    assert verdict.see(both)
    assert not verdict.ready


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic a-key", "Bearer A-KEY", "Bearer a-key2", "a-key", "Bearer ключ"]
)
def test_wrong_keys_are_refused(header: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        tenant_of(header, {"a-key": "acme"})
    assert caught.value.status == 401


def test_right_keys_have_their_tenant() -> None:
    keys = {"a-key": "acme", "b-key": "bolt"}
    assert tenant_of("Bearer a-key", keys) == "acme"
    assert tenant_of("bearer  b-key", keys) == "bolt"
    assert tenant_of(None, None) == tenant_of("Bearer whatever", {}) == "default"


def test_settings_that_make_no_sense_are_refused() -> None:
    for keys in ({"": "acme"}, {"a": ""}, {" a": "acme"}, {"ключ": "acme"}):
        with pytest.raises(ValueError, match="api_keys"):
            GatewayConfig(api_keys=keys)


@given(
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    num_prompts=st.integers(1, 4),
    num_choices=st.integers(1, 5),
)
def test_fan_out(seed: int | None, num_prompts: int, num_choices: int) -> None:
    prompts = [([at] * (at + 1), Sampling(seed=seed)) for at in range(num_prompts)]
    plan = policy.fan_out(RequestId("r"), MODEL, TenantId("t"), prompts, num_choices)
    ids = [request.request_id for request in plan.submissions]
    assert len(set(ids)) == num_prompts * num_choices
    assert ids == (["r"] if len(ids) == 1 else [f"r-{at}" for at in range(len(ids))])
    assert plan.prompt_tokens == sum(range(1, num_prompts + 1))
    for index, request in enumerate(plan.submissions):
        prompt, choice = divmod(index, num_choices)
        assert request.tokens == (prompt,) * (prompt + 1)
        if seed is None:
            assert request.sampling.seed is None
        else:
            assert request.sampling.seed is not None
            assert (request.sampling.seed - seed - choice) % 2**64 == 0
        # It must be a message that the other side can decode.
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=type(request)) == request


def test_usage_is_summed_and_cached_is_what_no_choice_computed() -> None:
    prompts = [([1, 2, 3], Sampling()), ([1, 2, 3, 4], Sampling())]
    plan = policy.fan_out(RequestId("r"), MODEL, TenantId("t"), prompts, 2)
    usages = [
        Usage(prompt_tokens=3, completion_tokens=1, cached_tokens=0),
        Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=2),
        Usage(prompt_tokens=4, completion_tokens=3, cached_tokens=3),
        Usage(prompt_tokens=4, completion_tokens=4, cached_tokens=3),
    ]
    usage = usage_of(plan, usages)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 10, 17)
    assert usage.prompt_tokens_details.cached_tokens == 3


def test_a_completions_default_length_fits_the_context() -> None:
    assert policy.with_default_length(Sampling(), [1] * 10, CARD).max_tokens == 16
    assert policy.with_default_length(Sampling(), [1] * 95, CARD).max_tokens == 5
    assert policy.with_default_length(Sampling(max_tokens=30), [1] * 95, CARD).max_tokens == 30


def test_every_error_code_has_a_status_and_a_body() -> None:
    for code in ErrorCode:
        error = from_wire(Error(code=code, message="why"))
        assert 400 <= error.status < 600
        assert msgspec.json.decode(error.body())["error"]["message"] == "why"
