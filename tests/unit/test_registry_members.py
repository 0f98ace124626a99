"""The member table: who joins, who is late, who is lost, and when the silence is our own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.machine import IllegalTransition, Machine
from halfmoon.registry import members
from halfmoon.registry.members import MemberTable
from halfmoon.registry.state import MEMBER_TABLE, PRESENT, ROLE_TABLE, MemberPhase, MemberSign, Role, RoleEvent
from halfmoon.schemas.ids import NodeId, RequestId, WorkerId
from halfmoon.schemas.members import (
    MEMBER_LOST_AFTER_S,
    Goodbye,
    MemberState,
    RequestProgress,
    ServiceHeartbeat,
    WorkerHeartbeat,
)
from halfmoon.schemas.registry import MemberEvent, MemberJoined, MemberLost
from halfmoon.schemas.splits import Role as WorkerRole
from support.registry import pool_beat

POOL = WorkerId("kv-1")
OTHER = ServiceHeartbeat(worker=WorkerId("registry-1"), service="registry", started_ns=1, state=MemberState.SERVING)


def run(table: MemberTable, seconds: float, start_s: float, *beating: object) -> tuple[list[MemberEvent], float]:
    """Time passes in steps of a quarter second; `beating` members beat, and the registry itself does."""
    events: list[MemberEvent] = []
    now_s = start_s
    while now_s < start_s + seconds:
        now_s += 0.25
        for heartbeat in (OTHER, *beating):
            events += table.hear(heartbeat, now_s)  # type: ignore[arg-type]
        events += table.judge()
    return [event for event in events if event.worker != OTHER.worker], now_s


def test_a_member_joins_once_is_lost_once_and_may_come_back() -> None:
    table, beat = MemberTable(), pool_beat("kv-1", "a", 5)
    events, now_s = run(table, 3.0, 100.0, beat)
    assert events == [MemberJoined(worker=POOL, node=NodeId("a"))]
    assert table.nodes_present() == {NodeId("a"): 5}
    events, now_s = run(table, 1.5, now_s)
    assert events == []
    assert table.phase(POOL) is MemberPhase.SUSPECT
    assert table.nodes_present() == {NodeId("a"): 5}, "late is not lost"
    events, now_s = run(table, 1.0, now_s)
    assert events == [MemberLost(worker=POOL, node=NodeId("a"), reason="no heartbeat for 2.2 s")]
    assert table.nodes_present() == {}
    assert table.nodes_gone() == {NodeId("a")}
    events, now_s = run(table, 0.5, now_s, beat)
    assert events == [MemberJoined(worker=POOL, node=NodeId("a"))]
    assert table.nodes_gone() == frozenset()


def test_goodbye_is_loss_without_the_wait_and_a_straggler_after_it_is_ignored() -> None:
    table = MemberTable()
    run(table, 1.0, 0.0, pool_beat("kv-1", "a", 5))
    lost = MemberLost(worker=POOL, node=NodeId("a"), reason="left")
    assert table.hear(Goodbye(worker=POOL), 1.1) == (lost,)
    assert table.hear(Goodbye(worker=POOL), 1.1) == ()
    assert table.hear(pool_beat("kv-1", "a", 5), 1.2) == ()
    assert table.phase(POOL) is MemberPhase.LEFT
    joined = MemberJoined(worker=POOL, node=NodeId("a"))
    assert table.hear(pool_beat("kv-1", "a", 6, started_ns=2), 1.3) == (joined,)
    assert table.hear(Goodbye(worker=WorkerId("nobody")), 1.3) == ()


def test_a_quick_restart_is_a_loss_and_a_return() -> None:
    table = MemberTable()
    table.hear(pool_beat("kv-1", "a", 5), 0.0)
    node = NodeId("a")
    assert table.hear(pool_beat("kv-1", "a", 6, started_ns=2), 0.2) == (
        MemberLost(worker=POOL, node=node, reason="restarted"),
        MemberJoined(worker=POOL, node=node),
    )
    assert table.hear(pool_beat("kv-1", "a", 5, started_ns=1), 0.3) == (), "an older life, late"
    assert table.nodes_present() == {node: 6}


def test_the_death_of_an_old_life_does_not_take_the_node_from_its_successor() -> None:
    table = MemberTable()
    _, now_s = run(table, 1.0, 0.0, pool_beat("kv-old", "a", 5))
    events, _ = run(table, 4.0, now_s, pool_beat("kv-new", "a", 6, started_ns=2))
    assert events == [
        MemberJoined(worker=WorkerId("kv-new"), node=NodeId("a")),
        MemberLost(worker=WorkerId("kv-old"), node=None, reason="no heartbeat for 2.2 s"),
    ]
    assert table.nodes_present() == {NodeId("a"): 6}
    assert table.nodes_gone() == frozenset()


def test_a_workers_death_names_no_node() -> None:
    table = MemberTable()
    beat = WorkerHeartbeat(
        worker=WorkerId("prefill-1"),
        role=WorkerRole.PREFILL,
        node=NodeId("a"),
        started_ns=1,
        state=MemberState.SERVING,
        requests=(RequestProgress(request_id=RequestId("r"), num_tokens=3),),
    )
    _, now_s = run(table, 1.0, 0.0, beat)
    assert {each.worker for each in table.take_fresh()} == {beat.worker, OTHER.worker}
    assert table.take_fresh() == ()
    table.hear(beat, now_s)
    assert [each.requests for each in table.take_fresh() if isinstance(each, WorkerHeartbeat)] == [()]
    events, _ = run(table, 3.0, now_s)
    assert [(event.worker, event.node) for event in events] == [(beat.worker, None)]


def test_while_nobody_is_heard_nobody_is_lost() -> None:
    table = MemberTable()
    _, now_s = run(table, 1.0, 0.0, pool_beat("kv-1", "a", 5))
    listened_s = table.listened_s
    assert table.judge() == ()
    events, now_s = run(table, 0.5, now_s + 25.0)
    assert table.listened_s - listened_s <= 0.5
    assert events == [], "it still has the time that it had before we went deaf"
    events, _ = run(table, 2.5, now_s)
    assert [event.worker for event in events] == [POOL]


def test_a_pause_of_this_process_is_nobodys_fault() -> None:
    table = MemberTable()
    _, now_s = run(table, 1.0, 0.0, pool_beat("kv-1", "a", 5))
    table.hear(OTHER, now_s + 30.0)
    assert table.judge() == ()
    assert table.phase(POOL) is MemberPhase.ALIVE


def test_members_recalled_from_the_last_leader_are_lost_unless_they_are_heard() -> None:
    table = MemberTable()
    table.hear(OTHER, 0.0)
    table.recall((pool_beat("kv-1", "a", 5), OTHER))
    assert table.phase(POOL) is MemberPhase.SUSPECT
    assert table.announce_all() == (
        MemberJoined(worker=OTHER.worker),
        MemberJoined(worker=POOL, node=NodeId("a")),
    )
    events, _ = run(table, 3.0, 0.0)
    assert [event.worker for event in events] == [POOL]


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "MAX_MEMBERS", 2)
    table = MemberTable()
    for number in range(4):
        table.hear(pool_beat(f"kv-{number}", f"n{number}", 1), 0.0)
    assert (sum(table.count().values()), table.refused) == (2, 2)


def test_what_is_gone_for_long_is_forgotten() -> None:
    table = MemberTable()
    _, now_s = run(table, 1.0, 0.0, pool_beat("kv-1", "a", 5))
    run(table, members.FORGET_AFTER_S + 3, now_s)
    assert table.phase(POOL) is MemberPhase.UNKNOWN
    assert sum(table.count().values()) == 1


@pytest.mark.parametrize("phase", MemberPhase)
@pytest.mark.parametrize("sign", MemberSign)
def test_what_the_table_does_not_allow_raises_and_changes_nothing(phase: MemberPhase, sign: MemberSign) -> None:
    machine = Machine(MEMBER_TABLE, phase)
    if (phase, sign) in MEMBER_TABLE:
        assert machine.fire(sign) is MEMBER_TABLE[phase, sign]
        return
    with pytest.raises(IllegalTransition):
        machine.fire(sign)
    assert machine.state is phase


def test_roles() -> None:
    machine = Machine(ROLE_TABLE, Role.STANDBY)
    for event, expected in (
        (RoleEvent.ELECTED, Role.LEADING),
        (RoleEvent.DEPOSED, Role.STANDBY),
        (RoleEvent.STOP, Role.STOPPED),
    ):
        assert machine.fire(event) is expected
    assert not any(machine.can(event) for event in RoleEvent)


_worlds = st.lists(
    st.tuples(st.sampled_from(["beat", "goodbye", "judge", "restart"]), st.integers(0, 2), st.floats(0, 1.5)),
    max_size=60,
)


@given(_worlds)
def test_joined_and_lost_alternate_for_every_member(world: list[tuple[str, int, float]]) -> None:
    table, now_s, lives = MemberTable(), 0.0, [1, 1, 1]
    listed: set[WorkerId] = set()
    for what, number, passed_s in world:
        now_s += passed_s
        worker = f"kv-{number}"
        if what == "judge":
            events = table.judge()
        elif what == "goodbye":
            events = table.hear(Goodbye(worker=WorkerId(worker)), now_s)
        else:
            lives[number] += what == "restart"
            events = table.hear(pool_beat(worker, f"n{number}", lives[number], lives[number]), now_s)
        for event in events:
            if isinstance(event, MemberJoined):
                assert event.worker not in listed
                listed.add(event.worker)
            else:
                listed.remove(event.worker)
        present = {WorkerId(f"kv-{n}") for n in range(3) if table.phase(WorkerId(f"kv-{n}")) in PRESENT}
        assert listed == present
    assert MEMBER_LOST_AFTER_S > members.LATE_AFTER_S
