"""The load view: what heartbeats say, and what counts before they say it."""

import msgspec

from halfmoon.conductor.flights import Flights
from halfmoon.conductor.members import HEARTBEAT_LAG_S, Members
from halfmoon.schemas.ids import NodeId, RequestId, TransferId, WorkerId
from halfmoon.schemas.members import (
    HEARTBEAT_INTERVAL_S,
    MEMBER_LOST_AFTER_S,
    Goodbye,
    MemberState,
    NodeHeartbeat,
    RequestProgress,
    ServiceHeartbeat,
    WorkerHeartbeat,
)
from halfmoon.schemas.pool_stats import PoolStats
from halfmoon.schemas.requests import Sampling
from halfmoon.schemas.splits import DecodeHalf, HalfEnded, PrefillHalf, Role
from support.conductors import CARD, MODEL, node_beat

P1, D1 = WorkerId("p1"), WorkerId("d1")
REQ = RequestId("req-1")
XFER = TransferId("xfer-1")


def beat(worker: WorkerId = P1, role: Role = Role.PREFILL, started_ns: int = 1, **fields: object) -> WorkerHeartbeat:
    values = {"state": MemberState.SERVING, "card": CARD, "max_requests": 2, "free_tokens": 500, **fields}
    return WorkerHeartbeat(worker=worker, role=role, node=NodeId("a"), started_ns=started_ns, **values)  # type: ignore[arg-type]


def prefill_half(request_id: RequestId = REQ, num_tokens: int = 100, num_reused: int = 0) -> PrefillHalf:
    return PrefillHalf(
        request_id=request_id,
        transfer_id=XFER,
        conductor=WorkerId("c"),
        model=MODEL,
        tenant="default",  # type: ignore[arg-type]
        root=b"",
        tokens=(1,) * num_tokens,
        reuse=((),) * num_reused,
        decode_worker=D1,
    )


def decode_half(request_id: RequestId = REQ, known: tuple[int, ...] = (), transfer_id: TransferId = XFER) -> DecodeHalf:
    return DecodeHalf(
        request_id=request_id,
        transfer_id=transfer_id,
        conductor=WorkerId("c"),
        model=MODEL,
        tenant="default",  # type: ignore[arg-type]
        root=b"",
        tokens=(1,) * 100,
        sampling=Sampling(max_tokens=20),
        seed=1,
        reply="r",
        prefill_worker=P1,
        known=known,
    )


def shown(request_id: RequestId = REQ, num_tokens: int = 0, *new: int) -> RequestProgress:
    return RequestProgress(request_id=request_id, num_tokens=num_tokens, new_tokens=new)


def test_work_counts_from_when_it_is_sent_until_a_heartbeat_shows_it() -> None:
    members = Members()
    members.hear(beat(queued_tokens=10, free_tokens=500), 0.0)
    members.sent_prefill(P1, prefill_half(num_reused=2), 0.01)
    (load,) = members.cluster().workers
    assert (load.num_requests, load.queued_tokens, load.free_tokens) == (1, 10 + 100 - 32, 400)
    # One that left before the half came does not show it, and does not undo it.
    members.hear(beat(queued_tokens=10), 0.02)
    assert members.cluster().workers[0].num_requests == 1
    members.hear(beat(queued_tokens=110, num_running=1, requests=(shown(),)), 0.03)
    (load,) = members.cluster().workers
    assert (load.num_requests, load.queued_tokens) == (1, 110)


def test_what_is_hot_in_the_engine_is_not_counted_as_work() -> None:
    members = Members()
    members.hear(beat(), 0.0)
    members.hear(beat(D1, Role.DECODE), 0.0)
    half = prefill_half(num_reused=2)
    members.sent_prefill(P1, msgspec.structs.replace(half, num_hot=4), 0.01)
    members.sent_decode(D1, msgspec.structs.replace(decode_half(), num_hot=6, prefill_worker=None), 0.01)
    queued = {load.worker: load.queued_tokens for load in members.cluster().workers}
    assert queued == {P1: 100 - 4 * 16, D1: 100 - 6 * 16}


def test_a_card_of_one_that_may_not_start_names_no_model() -> None:
    members = Members()
    members.hear(beat(state=MemberState.LOADING), 0.0)
    assert members.cluster().models == {}
    members.hear(beat(), 0.1)
    assert members.cluster().models == {MODEL: CARD}


def test_a_heartbeat_that_is_late_enough_is_believed() -> None:
    members = Members()
    members.hear(beat(), 0.0)
    members.sent_prefill(P1, prefill_half(), 0.01)
    members.hear(beat(), 0.02 + HEARTBEAT_LAG_S)
    assert members.cluster().workers[0].num_requests == 0


def test_what_has_ended_counts_no_more_before_the_next_heartbeat() -> None:
    members = Members()
    members.hear(beat(D1, Role.DECODE, num_running=1, requests=(shown(),)), 0.0)
    ended = HalfEnded(request_id=REQ, transfer_id=XFER, worker=D1, role=Role.DECODE)
    members.half_ended(ended)
    members.half_ended(ended)
    assert members.cluster().workers[0].num_requests == 0
    members.sent_decode(D1, decode_half(RequestId("req-2")), 0.1)
    (load,) = members.cluster().workers
    assert (load.num_requests, load.free_tokens, load.queued_tokens) == (1, 380, 1)
    members.refused(D1, RequestId("req-2"))
    assert members.cluster().workers[0].num_requests == 0


def listened(members: Members, from_s: float, to_s: float) -> list[WorkerId]:
    """Who was lost meanwhile, while others were heard."""
    other = ServiceHeartbeat(worker=WorkerId("r"), service="registry", started_ns=1, state=MemberState.SERVING)
    lost, now_s = [], from_s
    while now_s < to_s:
        now_s = min(to_s, now_s + HEARTBEAT_INTERVAL_S)
        members.hear(other, now_s)
        lost += members.expire()
    return lost


def test_nobody_is_lost_by_the_silence_of_all_or_by_a_pause_of_ones_own() -> None:
    members = Members()
    members.hear(beat(), 0.0)
    members.hear(node_beat("a", 1), 0.0)
    # The broker stands still for ten seconds; then this process does for twenty.
    assert listened(members, 10.0, 10.5) == []
    assert listened(members, 30.0, 30.25) == []
    assert members.cluster().nodes == {"a": 1}
    # But whoever is silent among others is lost, as late as ever.
    assert listened(members, 30.25, 30.25 + MEMBER_LOST_AFTER_S) == [P1]
    assert members.cluster().nodes == {}


def test_silence_goodbye_and_a_new_life_end_a_life() -> None:
    members = Members()
    assert members.hear(beat(), 0.0) is None
    assert members.hear(beat(started_ns=2), 0.1) == P1
    assert members.hear(beat(started_ns=1), 0.2) is None
    assert members.life_of(P1) == 2
    assert listened(members, 0.2, 0.09 + MEMBER_LOST_AFTER_S) == []
    assert listened(members, 0.09 + MEMBER_LOST_AFTER_S, 0.11 + MEMBER_LOST_AFTER_S) == [P1]
    assert members.life_of(P1) is None
    members.hear(beat(), 5.0)
    assert members.hear(Goodbye(worker=P1), 5.1) == P1
    assert members.hear(Goodbye(worker=P1), 5.2) is None
    service = ServiceHeartbeat(worker=WorkerId("g"), service="gateway", started_ns=1, state=MemberState.SERVING)
    assert members.hear(service, 5.2) is None
    assert members.cluster().models == {MODEL: CARD}


def test_nodes_are_live_with_their_newest_epoch() -> None:
    members = Members()
    members.hear(node_beat("a", 5), 0.0)
    members.hear(node_beat("a", 4), 0.0)
    members.hear(node_beat("b", 1), 1.0)
    assert members.cluster().nodes == {"a": 5, "b": 1}
    listened(members, 1.0, 0.1 + MEMBER_LOST_AFTER_S)
    assert members.cluster().nodes == {"b": 1}
    members.hear(Goodbye(worker=WorkerId("kv-tier-b")), 2.0)
    assert members.cluster().nodes == {}


def test_only_those_that_serve_are_offered() -> None:
    members = Members()
    members.hear(beat(state=MemberState.LOADING, card=None), 0.0)
    assert members.cluster().workers == ()
    members.hear(beat(), 0.1)
    assert len(members.cluster().workers) == 1
    members.hear(beat(state=MemberState.DRAINING), 0.2)
    assert members.cluster().workers == ()
    assert members.life_of(P1) == 1


def test_known_tokens_have_no_gap() -> None:
    flights = Flights()
    flights.sent_decode(D1, decode_half())
    flights.progress([shown(REQ, 2, 11, 12)])
    flights.progress([shown(REQ, 3, 13)])
    assert flights.known(REQ) == (11, 12, 13)
    flights.progress([shown(REQ, 6, 16)])
    flights.progress([shown(REQ, 7, 17)])
    assert flights.known(REQ) == (11, 12, 13)
    # Another worker goes on from there, and tells what came in between.
    flights.sent_decode(D1, decode_half(known=(11, 12, 13), transfer_id=TransferId("xfer-2")))
    flights.progress([shown(REQ, 5, 14, 15)])
    assert flights.known(REQ) == (11, 12, 13, 14, 15)
    stale = HalfEnded(request_id=REQ, transfer_id=XFER, worker=D1, role=Role.DECODE)
    flights.ended(stale)
    assert flights.get(REQ) is not None
    flights.ended(HalfEnded(request_id=REQ, transfer_id=TransferId("xfer-2"), worker=D1, role=Role.DECODE))
    assert flights.get(REQ) is None


def test_flights_are_bounded() -> None:
    flights = Flights(max_flights=3)
    for number in range(5):
        flights.sent_prefill(P1, prefill_half(RequestId(f"req-{number}")))
    assert len(flights) == 3
    assert flights.get(RequestId("req-0")) is None
    flights.transfer_done(RequestId("req-4"), P1)
    flight = flights.get(RequestId("req-4"))
    assert flight is not None
    assert flight.prefill_worker is None


def test_conductors_are_those_that_serve_and_are_heard() -> None:
    members = Members()

    def beat(state: MemberState, service: str = "conductor") -> ServiceHeartbeat:
        return ServiceHeartbeat(worker=WorkerId("c"), service=service, started_ns=1, state=state)

    for heartbeat in (beat(MemberState.LOADING), beat(MemberState.SERVING, "gateway")):
        members.hear(heartbeat, 0.0)
        assert members.conductors() == frozenset()
    members.hear(beat(MemberState.SERVING), 0.0)
    assert members.conductors() == {"c"}
    listened(members, 0.0, MEMBER_LOST_AFTER_S + 0.1)
    assert members.conductors() == frozenset()
    for end in (beat(MemberState.DRAINING), Goodbye(worker=WorkerId("c"))):
        members.hear(beat(MemberState.SERVING), 5.0)
        members.hear(end, 5.1)
        assert members.conductors() == frozenset()


def test_pools_that_take_chunks_are_shown_with_their_room() -> None:
    members = Members()
    stats = PoolStats(total=10, free=3, staged=1, ready=4, leased=2, num_leases=2, num_chunks=6)
    for node, state, pool in (
        ("a", MemberState.SERVING, stats),
        ("b", MemberState.DRAINING, stats),
        ("c", MemberState.SERVING, None),
    ):
        members.hear(
            NodeHeartbeat(
                worker=WorkerId(node), node=NodeId(node), epoch=1, started_ns=1, state=state, host="h", pool=pool
            ),
            0.0,
        )
    assert list(members.pools()) == ["a"]
    assert members.pools()[NodeId("a")].room == 3
