"""Cost models: what they learn, and what they don't let themselves be told."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.scheduling.cluster import WorkerLoad
from halfmoon.scheduling.costs.fitted import Fitted
from halfmoon.scheduling.costs.regression import Regression
from halfmoon.scheduling.costs.traffic import SHOWN_AFTER_S, Traffic
from halfmoon.scheduling.estimates import Assumed, token_pairs
from halfmoon.scheduling.topology import distance, link_class
from halfmoon.schemas.ids import NodeId, WorkerId
from halfmoon.schemas.measurements import DecodeSample, PrefillSample, PullSample
from halfmoon.schemas.splits import Role
from support.conductors import CARD

A, B, C, D = (NodeId(f"node-{letter}") for letter in "abcd")
LIKE = (CARD.name, CARD.fingerprint, Role.PREFILL.value)


def worker(name: str, role: Role = Role.PREFILL, **load: int) -> WorkerLoad:
    return WorkerLoad(worker=WorkerId(name), role=role, node=A, card=CARD, **load)


def truth(num_tokens: int, num_reused: int) -> float:
    return 0.01 + 1e-4 * (num_tokens - num_reused) + 2e-9 * token_pairs(num_tokens, num_reused)


def prefilled(fitted: Fitted, name: str, count: int, *, slower: float = 1.0, outliers: float = 0.0) -> None:
    draw = random.Random(count)
    for _ in range(count):
        num_tokens = draw.randint(100, 16_000)
        num_reused = draw.choice([0, num_tokens // 2])
        duration_s = slower * truth(num_tokens, num_reused) * draw.gauss(1, 0.03)
        if draw.random() < outliers:
            duration_s *= 30
        fitted.prefilled(
            WorkerId(name),
            LIKE,
            PrefillSample(num_tokens=num_tokens, num_reused=num_reused, duration_s=duration_s),
        )


@pytest.mark.parametrize("assumed_tokens_per_s", [500.0, 10_000.0, 200_000.0])
def test_a_prefill_model_finds_the_line_from_any_prior_and_through_outliers(assumed_tokens_per_s: float) -> None:
    fitted = Fitted(Assumed(prefill_tokens_per_s=assumed_tokens_per_s), Traffic())
    prefilled(fitted, "p1", 300, outliers=0.04)
    for num_tokens, num_reused in [(500, 0), (4_000, 2_000), (16_000, 0), (16_000, 8_000)]:
        assert fitted.prefill_s(worker("p1"), num_tokens, num_reused) == pytest.approx(
            truth(num_tokens, num_reused), rel=0.2
        )


def test_a_worker_begins_with_what_its_like_have_shown_and_then_shows_its_own() -> None:
    fitted = Fitted(Assumed(), Traffic())
    assert fitted.prefill_s(worker("p1"), 2_000, 0) == 1.0
    prefilled(fitted, "p1", 100)
    known = fitted.prefill_s(worker("p1"), 8_000, 0)
    assert fitted.prefill_s(worker("p2"), 8_000, 0) == pytest.approx(known, rel=0.05)
    prefilled(fitted, "p2", 100, slower=3.0)
    assert fitted.prefill_s(worker("p2"), 8_000, 0) == pytest.approx(3 * truth(8_000, 0), rel=0.15)
    assert fitted.prefill_s(worker("p1"), 8_000, 0) == known
    fitted.forget(WorkerId("p2"))
    assert fitted.prefill_s(worker("p2"), 8_000, 0) < 3 * truth(8_000, 0) * 0.9


def test_a_queue_takes_what_its_prompts_take_one_after_the_other() -> None:
    fitted = Fitted(Assumed(), Traffic())
    prefilled(fitted, "p1", 200)
    lengths = [(6_000, 0), (12_000, 6_000), (300, 0)]
    queued = worker(
        "p1",
        num_requests=len(lengths),
        queued_tokens=sum(num_tokens - num_reused for num_tokens, num_reused in lengths),
        queued_pairs=int(sum(token_pairs(*each) for each in lengths)),
    )
    alone = sum(fitted.prefill_s(worker("p1"), *each) for each in lengths)
    assert fitted.queue_s(queued) == pytest.approx(alone, rel=1e-3)
    assert fitted.queue_s(worker("p1")) == 0.0


def test_tbt_follows_batch_and_context() -> None:
    fitted = Fitted(Assumed(), Traffic())
    draw = random.Random(1)
    for _ in range(200):
        batch, context = draw.randint(1, 32), draw.randint(1_000, 100_000)
        sample = DecodeSample(batch=batch, context_tokens=context, step_s=0.02 + 5e-4 * batch + 1e-7 * context)
        fitted.decoded(WorkerId("d1"), (CARD.name, CARD.fingerprint, Role.DECODE.value), sample)
    decode = worker("d1", Role.DECODE, num_requests=7, context_tokens=40_000)
    assert fitted.tbt_s(decode, 8, 50_000) == pytest.approx(0.02 + 0.004 + 0.005, rel=0.03)
    assert fitted.next_tbts_s([decode], 10_000) == [pytest.approx(fitted.tbt_s(decode, 8, 50_000))]


def test_a_link_is_judged_by_its_pair_then_by_its_class_then_by_all() -> None:
    fitted = Fitted(Assumed(pull_bytes_per_s=1e9), Traffic())
    for node, rack in ((A, "r1"), (B, "r1"), (C, "r2"), (D, "r2")):
        fitted.place(node, {"rack": rack, "zone": "z"})
    assert fitted.pull_s(A, B, 10**9) == pytest.approx(1.0)
    draw = random.Random(2)

    def pulled(source: NodeId, destination: NodeId, bytes_per_s: float) -> None:
        for _ in range(60):
            num_bytes = draw.randint(10**6, 10**8)
            fitted.pulled(
                destination,
                PullSample(source=source, num_bytes=num_bytes, duration_s=0.001 + num_bytes / bytes_per_s),
            )

    pulled(A, B, 10e9)
    pulled(A, C, 2e9)
    within, across = fitted.pull_s(A, B, 10**9), fitted.pull_s(A, C, 10**9)
    assert within == pytest.approx(0.101, rel=0.1)
    assert across == pytest.approx(0.501, rel=0.1)
    # Unmeasured pairs are as others of their class.
    assert fitted.pull_s(D, C, 10**9) == pytest.approx(within, rel=0.15)
    assert fitted.pull_s(D, B, 10**9) == pytest.approx(across, rel=0.15)
    assert fitted.least_pull_s(10**9) <= min(within, across)
    assert fitted.pull_s(A, A, 10**9) == 0.0


def test_what_both_ends_move_already_is_waited_for() -> None:
    traffic = Traffic()
    fitted = Fitted(Assumed(pull_bytes_per_s=100.0), traffic)
    assert fitted.pull_s(A, B, 100) == pytest.approx(1.0)
    traffic.asked(C, {A: 300}, 0.0)
    assert fitted.pull_s(A, B, 100) == pytest.approx(4.0)
    assert fitted.pull_s(D, C, 100) == pytest.approx(4.0)
    assert fitted.pull_s(D, B, 100) == pytest.approx(1.0)
    traffic.hear(C, {A: 200}, SHOWN_AFTER_S / 2)
    assert traffic.ahead(A, B) == 500  # too early to be sure that the 300 are among the 200
    traffic.hear(C, {A: 200}, 2 * SHOWN_AFTER_S)
    assert traffic.ahead(A, B) == 200
    traffic.hear(C, {}, 3 * SHOWN_AFTER_S)
    assert traffic.moving(A) == traffic.moving(C) == 0
    traffic.asked(C, {A: 300}, 4.0)
    traffic.forget(C)
    assert traffic.moving(A) == 0


def test_an_ssd_is_read_before_what_is_on_it_can_be_sent() -> None:
    fitted = Fitted(Assumed(pull_bytes_per_s=100.0, ssd_bytes_per_s=50.0), Traffic())
    assert fitted.pull_s(A, B, 100, from_ssd=True) == pytest.approx(3.0)
    assert fitted.pull_s(A, A, 100, from_ssd=True) == pytest.approx(2.0)
    for _ in range(50):
        fitted.pulled(A, PullSample(source=A, num_bytes=100, duration_s=1.0))
    assert fitted.pull_s(A, A, 100, from_ssd=True) == pytest.approx(1.0, rel=0.1)


def test_the_error_of_a_model_is_what_it_was_off_before_it_learned() -> None:
    model = Regression((0.0, 1.0), (1.0, 1.0))
    model.observe((1.0, 10.0), 20.0)
    assert model.error == pytest.approx(0.5)
    for _ in range(200):
        model.observe((1.0, 10.0), 20.0)
    assert model.error < 0.01


@given(
    st.lists(
        st.tuples(st.floats(0, 1e5), st.floats(0, 1e9), st.floats(allow_nan=True, allow_infinity=True)), max_size=60
    )
)
def test_whatever_is_measured_no_coefficient_is_negative_or_not_a_number(
    samples: list[tuple[float, float, float]],
) -> None:
    model = Regression((0.005, 1e-4, 0.0), (0.02, 1e-4, 1e-8))
    for tokens, pairs, seconds in samples:
        model.observe((1.0, tokens, pairs), seconds)
        assert all(0 <= each < float("inf") for each in model.coefficients)


def test_labels_say_how_far_nodes_are() -> None:
    labels = {
        A: {"switch": "s1", "rack": "r1", "zone": "z1"},
        B: {"switch": "s1", "rack": "r1", "zone": "z1", "nic": "roce-200"},
        C: {"switch": "s2", "rack": "r1", "zone": "z1"},
        D: {"zone": "z1"},
    }
    other = NodeId("unlabelled")
    assert [distance(labels, A, each) for each in (A, B, C, D, other)] == [0, 1, 2, 3, 4]
    assert distance(labels, D, A) == 3
    assert link_class(labels, A, C) == "rack"
    assert link_class(labels, A, other) == "far"
    assert link_class(labels, A, B) != link_class(labels, B, A) != "switch"
