"""What an owner does next, for every combination of what it may know; and the table's illegal transitions."""

import itertools

import pytest

from halfmoon.conductor.state import INITIAL, TABLE, TERMINAL, RequestEvent, RequestState
from halfmoon.conductor.watch import (
    UNSHOWN_BEATS,
    Facts,
    Finish,
    GiveUp,
    HandBack,
    Resplit,
    Resume,
    TellCancel,
    Wait,
    next_step,
)
from halfmoon.machine import IllegalTransition, Machine


def all_facts() -> list[Facts]:
    flags = ("has_ended", "is_certain", "is_decode_lost", "is_prefill_lost", "is_cancelled", "is_cancel_sent")
    rest = ("can_move", "is_handed_back", "is_taken")
    found = []
    for values in itertools.product((False, True), repeat=len(flags) + len(rest)):
        for now_ns, late_ns, beats in itertools.product((0, 150, 500), (None, 200, 490), (0, UNSHOWN_BEATS)):
            found.append(
                Facts(
                    now_ns=now_ns,
                    deadline_ns=100,
                    grace_ns=100,
                    num_unshown_beats=beats,
                    late_since_ns=late_ns,
                    **dict(zip(flags + rest, values, strict=True)),
                )
            )
    return found


def test_the_conductor_never_speaks_after_decode_has() -> None:
    for facts in all_facts():
        if facts.has_ended:
            assert next_step(facts) == Finish(is_heard=True)


def test_it_speaks_only_where_decode_cannot() -> None:
    for facts in all_facts():
        step = next_step(facts)
        gone = facts.is_decode_lost or (facts.num_unshown_beats >= UNSHOWN_BEATS and not facts.is_certain)
        if isinstance(step, GiveUp):
            stuck = facts.late_since_ns is not None and facts.now_ns >= facts.late_since_ns + facts.grace_ns
            assert gone or stuck
        if isinstance(step, Resume):
            assert gone
            assert facts.now_ns < facts.deadline_ns
            assert facts.can_move
            assert not facts.is_cancelled


def test_what_another_has_is_let_go_of_whatever_else_is_so() -> None:
    for facts in all_facts():
        if facts.is_taken and not facts.has_ended:
            assert next_step(facts) == HandBack()


def test_waiting_ends_by_itself() -> None:
    for facts in all_facts():
        step = next_step(facts)
        if isinstance(step, Wait):
            assert step.until_ns > facts.now_ns


def test_each_step_in_turn() -> None:
    facts = Facts(now_ns=0, deadline_ns=100, grace_ns=50)
    assert next_step(facts) == Wait(150)
    assert next_step(Facts(now_ns=0, deadline_ns=100, grace_ns=50, is_prefill_lost=True)) == Resplit()
    assert next_step(Facts(now_ns=0, deadline_ns=100, grace_ns=50, is_cancelled=True)) == TellCancel(is_late=False)
    assert next_step(Facts(now_ns=0, deadline_ns=100, grace_ns=50, is_handed_back=True)) == HandBack()
    assert next_step(Facts(now_ns=150, deadline_ns=100, grace_ns=50)) == TellCancel(is_late=True)
    assert next_step(Facts(now_ns=160, deadline_ns=100, grace_ns=50, late_since_ns=150)) == Wait(200)
    late = Facts(now_ns=200, deadline_ns=100, grace_ns=50, late_since_ns=150)
    assert next_step(late) == GiveUp(is_cancelled=False, is_late=True)


@pytest.mark.parametrize("state", list(RequestState))
@pytest.mark.parametrize("event", list(RequestEvent))
def test_what_the_table_does_not_allow_raises_and_changes_nothing(state: RequestState, event: RequestEvent) -> None:
    machine = Machine(TABLE, state)
    if (state, event) in TABLE:
        assert machine.fire(event) is TABLE[state, event]
    else:
        with pytest.raises(IllegalTransition):
            machine.fire(event)
        assert machine.state is state


def test_every_state_is_reached_and_the_terminal_ones_are_left_by_nothing() -> None:
    reached = {INITIAL}
    while True:
        more = {following for (state, _), following in TABLE.items() if state in reached} | reached
        if more == reached:
            break
        reached = more
    assert reached == set(RequestState)
    assert {state for state, _ in TABLE}.isdisjoint(TERMINAL)
    assert {state for state, _ in TABLE} | TERMINAL == set(RequestState)
