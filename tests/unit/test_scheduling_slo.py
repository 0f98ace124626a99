"""Admission by SLO: what is judged, by which load, what a refusal says; prediction damps what `early` excites."""

import heapq
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.scheduling.cluster import WorkerLoad
from halfmoon.scheduling.contract import Ask, DecodeChoice, Plan, PrefillChoice
from halfmoon.scheduling.estimates import Assumed
from halfmoon.scheduling.outlook import Batch, Durations, Outlook
from halfmoon.scheduling.service_class import ClassSettings, ServiceClass, classes_of, default_classes
from halfmoon.scheduling.slo import Admission, AdmissionName, Breach, Limit
from halfmoon.schemas.ids import NodeId, RequestId, WorkerId
from halfmoon.schemas.splits import Role
from halfmoon.schemas.wire import ErrorCode
from support.conductors import CARD

D1, D2 = WorkerId("d1"), WorkerId("d2")
STEP_S = 0.01
ASSUMED = Assumed(decode_step_s=STEP_S, batch_share=1.0)
"""A batch of n takes n steps' time."""


def load(worker: str, role: Role = Role.DECODE) -> WorkerLoad:
    return WorkerLoad(worker=WorkerId(worker), role=role, node=NodeId("node"), card=CARD)


def plan(*decodes: str, ttft_s: float = 1.0) -> Plan:
    prefill = PrefillChoice(worker=load("p1", Role.PREFILL), num_reused=0, cost_s=ttft_s)
    return Plan(CARD, (prefill,), tuple(DecodeChoice(worker=load(each), ttft_s=ttft_s) for each in decodes), "test")


def ask(number: int = 0) -> Ask:
    return Ask(request_id=RequestId(f"r{number}"), num_tokens=100, max_tokens=10, has_chunks=True)


def judge(
    outlook: Outlook,
    service: ServiceClass,
    *,
    name: AdmissionName = AdmissionName.PREDICTIVE,
    asked: Plan | None = None,
    now_s: float = 0.0,
    waited_s: float = 0.0,
) -> Plan | Breach:
    return Admission(name, ASSUMED, outlook).judge(asked or plan("d1"), ask(), service, now_s, waited_s)


def busy(outlook: Outlook, worker: WorkerId, num: int, *, began_s: float = 0.0) -> None:
    for number in range(num):
        request_id = RequestId(f"{worker}-{number}")
        outlook.placed(worker, request_id, 50, began_s, began_s)
        outlook.began(request_id, began_s)


def test_a_first_token_that_would_come_too_late_is_refused_with_the_time_by_which_it_is_too_late() -> None:
    breach = judge(Outlook(), ServiceClass(ttft_s=2.0), asked=plan("d1", ttft_s=5.0))
    assert isinstance(breach, Breach)
    assert (breach.limit, breach.predicted_s, breach.limit_s, breach.retry_after_s) == (Limit.TTFT, 5.0, 2.0, 3.0)
    error = breach.error("interactive")
    assert error.code is ErrorCode.OVERLOADED
    assert error.retry_after_s == 3.0
    assert "time to first token would be 5 s, and class 'interactive' allows 2 s" in error.message


def test_what_it_has_waited_counts_as_well() -> None:
    service = ServiceClass(ttft_s=2.0)
    assert isinstance(judge(Outlook(), service, waited_s=0.9), Plan)
    assert isinstance(judge(Outlook(), service, waited_s=1.1), Breach)


@pytest.mark.parametrize("name", [AdmissionName.EARLY, AdmissionName.PREDICTIVE])
def test_tokens_that_would_come_too_slowly_are_refused(name: AdmissionName) -> None:
    outlook = Outlook()
    busy(outlook, D1, 3)
    assert isinstance(judge(outlook, ServiceClass(tbt_s=4 * STEP_S), name=name), Plan)
    breach = judge(outlook, ServiceClass(tbt_s=3.5 * STEP_S), name=name)
    assert isinstance(breach, Breach)
    assert breach.limit is Limit.TBT
    assert breach.predicted_s == pytest.approx(4 * STEP_S)


def test_another_decode_worker_that_keeps_the_limit_goes_first() -> None:
    outlook = Outlook()
    busy(outlook, D1, 3)
    judged = judge(outlook, ServiceClass(tbt_s=2 * STEP_S), asked=plan("d1", "d2"))
    assert isinstance(judged, Plan)
    assert [choice.worker.worker for choice in judged.decodes] == [D2, D1]


def test_a_class_without_limits_and_admission_none_refuse_nothing() -> None:
    outlook = Outlook()
    busy(outlook, D1, 100)
    asked = plan("d1", ttft_s=1e6)
    assert judge(outlook, ServiceClass(), asked=asked) is asked
    assert judge(outlook, ServiceClass(ttft_s=0.1, tbt_s=0.001), asked=asked, name=AdmissionName.NONE) is asked


def test_early_sees_what_runs_and_predictive_what_will() -> None:
    outlook, service = Outlook(), ServiceClass(tbt_s=2.5 * STEP_S)
    # Three are being prefilled, to begin before this one would: only prediction counts them.
    for number in range(3):
        outlook.placed(D1, RequestId(f"w{number}"), 50, 0.5, 0.0)
    assert isinstance(judge(outlook, service, name=AdmissionName.EARLY), Plan)
    assert isinstance(judge(outlook, service), Breach)
    # Three run, and will have ended when this one would begin: only `early` counts them.
    outlook = Outlook()
    for _ in range(20):
        outlook.durations.add(2.0)
    busy(outlook, D1, 3, began_s=-1.5)
    assert isinstance(judge(outlook, service, name=AdmissionName.EARLY), Breach)
    assert isinstance(judge(outlook, service), Plan)


def test_retry_after_is_when_enough_will_have_ended() -> None:
    outlook = Outlook()
    for _ in range(20):
        outlook.durations.add(10.0)
    busy(outlook, D1, 3)
    breach = judge(outlook, ServiceClass(tbt_s=2 * STEP_S))
    assert isinstance(breach, Breach)
    # They end at 10 s, this one would begin 1 s after its retry: 9 s, to a factor of two.
    assert 9.0 <= breach.retry_after_s <= 18.0


def test_decodes_of_one_length_end_together_and_others_when_they_are_likely_to() -> None:
    durations = Durations()
    assert durations.survival(5.0, 100.0) == 1.0
    for _ in range(10):
        durations.add(4.0)
    assert [durations.survival(age, more) for age, more in ((0, 3.9), (0, 4.0), (3, 0.9), (3, 1.0))] == [1, 0, 1, 0]
    for _ in range(10):
        durations.add(8.0)
    assert durations.survival(0.0, 5.0) == 0.5
    # One that has outlasted the short ones is one of the long ones.
    assert durations.survival(4.5, 3.0) == 1.0
    # One that has outlasted all may last as long again.
    assert durations.survival(10.0, 10.0) == 0.5


def test_what_a_decode_lasts_of_a_time_is_all_of_it_until_some_end_sooner() -> None:
    durations = Durations(max_durations=2)
    assert durations.within_s(7.0) == 7.0
    for duration_s in (100.0, 2.0, 4.0):
        durations.add(duration_s)
    assert [durations.within_s(seconds) for seconds in (-1.0, 0.0, 1.0, 3.0, 9.0)] == [0.0, 0.0, 1.0, 2.5, 3.0]


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=40), st.floats(0, 120), st.floats(0, 60), st.floats(0, 60))
def test_survival_is_a_probability_that_falls_with_time(
    seen: list[float], age_s: float, more_s: float, later_s: float
) -> None:
    durations = Durations(max_durations=16)
    for duration_s in seen:
        durations.add(duration_s)
    assert len(durations) == min(16, len(seen))
    assert 0.0 <= durations.survival(age_s, more_s + later_s) <= durations.survival(age_s, more_s) <= 1.0


def test_a_heartbeat_corrects_what_was_not_heard() -> None:
    outlook = Outlook()
    outlook.placed(D1, RequestId("a"), 50, 1.0, 0.0)
    outlook.placed(D1, RequestId("b"), 70, 1.0, 0.0)
    # `a` generates; `c` was never told of; `b` still waits for its KV and isn't in the batch.
    outlook.shown(D1, {RequestId("a"): 3, RequestId("c"): 5, RequestId("b"): 0}, 2.0)
    assert outlook.now(D1) == Batch(2, 50)
    # `a` has ended unheard.
    outlook.shown(D1, {RequestId("c"): 9, RequestId("b"): 0}, 3.0)
    assert outlook.now(D1) == Batch(1, 0)
    assert outlook.at(D1, 3.0, 3.0) == Batch(2, 70)
    outlook.lost(D1)
    assert (len(outlook), outlook.now(D1)) == (0, Batch())
    outlook.ended(RequestId("c"), 4.0)
    assert len(outlook.durations) == 0


def test_one_that_moves_is_on_its_new_worker_alone_and_a_dropped_one_teaches_nothing() -> None:
    outlook = Outlook()
    outlook.placed(D1, RequestId("a"), 50, 0.0, 0.0)
    outlook.placed(D2, RequestId("a"), 50, 0.0, 0.0)
    assert (outlook.at(D1, 0.0, 0.0), outlook.at(D2, 0.0, 0.0)) == (Batch(), Batch(1, 50))
    outlook.began(RequestId("a"), 1.0)
    outlook.dropped(RequestId("a"))
    assert len(outlook.durations) == 0
    outlook.placed(D2, RequestId("b"), 50, 0.0, 0.0)
    outlook.began(RequestId("b"), 1.0)
    outlook.ended(RequestId("b"), 4.0)
    assert outlook.durations.survival(0.0, 2.9) == 1.0
    assert outlook.durations.survival(0.0, 3.0) == 0.0


def test_who_comes_later_and_begins_sooner_is_counted() -> None:
    """One a second, each begun a second after it was placed: in ten seconds nine more will have begun."""
    outlook = Outlook()
    for number in range(30):
        request_id = RequestId(f"r{number}")
        outlook.placed(D1, request_id, 100, number + 1.0, float(number))
        outlook.began(request_id, number + 1.0)
        outlook.dropped(request_id)
    now_s = 31.0
    assert outlook.at(D1, now_s + 1.0, now_s) == Batch()
    ahead = outlook.at(D1, now_s + 10.0, now_s)
    assert ahead.num_requests == pytest.approx(9.0)
    assert ahead.context_tokens == pytest.approx(900.0)
    assert outlook.at(D2, now_s + 10.0, now_s) == Batch()
    # Where decodes last four seconds, those that began more than four seconds before have ended by then.
    outlook.durations.add(4.0)
    assert outlook.at(D1, now_s + 10.0, now_s).num_requests == pytest.approx(4.0)
    assert outlook.at(D1, now_s + 3.0, now_s).num_requests == pytest.approx(2.0)


def test_what_is_said_of_a_class_changes_nothing_else() -> None:
    assert classes_of({}) == default_classes()
    said = {
        "interactive": ClassSettings(ttft_s=2.0),
        "bulk": ClassSettings(priority=-5),
        "batch": ClassSettings(weight=4),
    }
    assert classes_of(said) == {
        "interactive": ServiceClass(ttft_s=2.0, weight=16.0),
        "batch": ServiceClass(weight=4.0, priority=-1),
        "bulk": ServiceClass(priority=-5),
    }


PREFILL_S = 20.0
DECODE_S = 10.0
MAX_BATCH = 5
NUM_ARRIVALS = 400


@dataclass(frozen=True)
class Course:
    """How one decode worker fared."""

    running: list[int]
    num_rejected: int


def overloaded(name: AdmissionName) -> Course:
    """One arrival a second, prefill that takes 20 s however many there are, decodes of 10 s: twice what may run."""
    outlook = Outlook()
    admission = Admission(name, ASSUMED, outlook)
    service = ServiceClass(tbt_s=MAX_BATCH * STEP_S)
    outlook.durations.add(DECODE_S)
    events: list[tuple[float, int, RequestId]] = []
    running: list[int] = []
    num_rejected = 0
    for number in range(NUM_ARRIVALS):
        now_s = number + 0.5
        while events and events[0][0] <= now_s:
            at_s, ends, request_id = heapq.heappop(events)
            if ends:
                outlook.ended(request_id, at_s)
            else:
                outlook.began(request_id, at_s)
                heapq.heappush(events, (at_s + DECODE_S, 1, request_id))
        judged = admission.judge(plan("d1", ttft_s=PREFILL_S), ask(number), service, now_s)
        if isinstance(judged, Plan):
            request_id = RequestId(f"r{number}")
            outlook.placed(D1, request_id, 0, now_s + PREFILL_S, now_s)
            heapq.heappush(events, (now_s + PREFILL_S, 0, request_id))
        else:
            num_rejected += 1
        running.append(round(outlook.now(D1).num_requests))
    return Course(running[100:], num_rejected)


def test_early_rejection_oscillates_and_prediction_damps_it() -> None:
    """Closed form: while prompts are computed, `early` sees an idle decode for 20 s and admits 20 or so, of which ten
    run at once; then it admits none until they are gone. Prediction admits five in every ten seconds."""
    early, predictive = overloaded(AdmissionName.EARLY), overloaded(AdmissionName.PREDICTIVE)
    assert (min(early.running), max(early.running)) == (0, 10)
    assert (min(predictive.running), max(predictive.running)) == (MAX_BATCH, MAX_BATCH)
    # No more are turned away for it, though none that is admitted is slowed down.
    assert sum(predictive.running) >= 0.9 * sum(min(each, MAX_BATCH) for each in early.running)
    assert predictive.num_rejected == pytest.approx(NUM_ARRIVALS / 2, abs=PREFILL_S)
