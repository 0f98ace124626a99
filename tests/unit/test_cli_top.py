"""What `halfmoon top` shows of what it hears."""

import io

import msgspec
import pytest
from rich.console import Console

from halfmoon.cli.top_board import WINDOW_S, Board, Snapshot
from halfmoon.cli.top_screen import fitted, screen
from halfmoon.schemas.ids import RequestId, TransferId, WorkerId
from halfmoon.schemas.members import MEMBER_LOST_AFTER_S, Goodbye, MemberState, ServiceHeartbeat
from halfmoon.schemas.requests import Usage
from halfmoon.schemas.scheduling import CostModel, Forecast, SchedulingReport
from halfmoon.schemas.splits import HalfEnded, Role
from support.examples import NODE_BEAT, WORKER_BEAT

MODEL = CostModel(kind="prefill", subject="p1", coefficients=(0.004, 1e-4, 2e-9), num_samples=9, error=0.07)


def conductor(name: str, num_requests: int, predicted_s: float) -> ServiceHeartbeat:
    ttft = Forecast(num_requests=num_requests, predicted_s=predicted_s, measured_s=1.0, error=0.5)
    return ServiceHeartbeat(
        worker=WorkerId(name),
        service="conductor",
        started_ns=1,
        state=MemberState.SERVING,
        scheduling=SchedulingReport(policy="kv_centric", num_placed=7, ttft=ttft, models=(MODEL,)),
    )


def ended(number: int, ttft_s: float, *, cached_tokens: int = 0) -> HalfEnded:
    return HalfEnded(
        request_id=RequestId(f"r{number}"),
        transfer_id=TransferId("t"),
        worker=WorkerId("d1"),
        role=Role.DECODE,
        num_generated_tokens=10,
        ttft_s=ttft_s,
        tbt_s=0.02,
        usage=Usage(prompt_tokens=100, completion_tokens=10, cached_tokens=cached_tokens),
    )


def test_rates_and_times_are_of_the_last_seconds() -> None:
    board = Board(0.0)
    board.ended(ended(0, 99.0), 1.0)
    for number in range(1, 21):
        board.ended(ended(number, number / 10, cached_tokens=50), 20.0)
    board.ended(msgspec.structs.replace(ended(30, 5.0), role=Role.PREFILL), 20.0)
    traffic = board.snapshot(20.0).traffic
    assert (traffic.window_s, traffic.requests_per_s, traffic.tokens_per_s) == (WINDOW_S, 2.0, 20.0)
    assert (traffic.ttft_p50_s, traffic.ttft_p99_s, traffic.tbt_p50_s) == (1.1, 2.0, 0.02)
    assert traffic.hit_ratio == 0.5
    assert board.snapshot(40.0).traffic.hit_ratio is None


def test_who_is_overdue_or_said_goodbye_is_not_shown() -> None:
    board = Board(0.0)
    board.hear(WORKER_BEAT, 0.0)
    board.hear(NODE_BEAT, 0.0)
    board.hear(conductor("c1", 1, 1.0), 1.0)
    there = board.snapshot(1.0)
    assert (len(there.workers), len(there.nodes), len(there.conductors)) == (1, 1, 1)
    assert there.workers[0].num_waiting == WORKER_BEAT.num_waiting
    later = board.snapshot(MEMBER_LOST_AFTER_S + 0.5)
    assert (len(later.workers), len(later.nodes), len(later.conductors)) == (0, 0, 1)
    board.hear(Goodbye(worker=WorkerId("c1")), 2.0)
    assert board.snapshot(2.0).conductors == ()


def test_forecasts_of_several_conductors_are_weighed_by_their_requests() -> None:
    board = Board(0.0)
    board.hear(conductor("c1", 30, 2.0), 0.0)
    board.hear(conductor("c2", 10, 4.0), 0.0)
    ttft = board.snapshot(0.0).ttft
    assert ttft is not None
    assert ttft.num_requests == 40
    assert ttft.predicted_s == pytest.approx(2.5)


def test_the_screen_names_everybody_and_the_json_is_whole() -> None:
    board = Board(0.0)
    for beat in (WORKER_BEAT, NODE_BEAT, conductor("c1", 3, 2.0)):
        board.hear(beat, 0.0)
    snapshot = board.snapshot(0.5)
    console = Console(file=io.StringIO(), width=160)
    console.print(screen(snapshot))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for part in (WORKER_BEAT.worker, NODE_BEAT.node, "c1: kv_centric", "4.0 ms + 10,000 tokens/s + 2.00 ns/pair", "7%"):
        assert part in text
    assert msgspec.json.decode(msgspec.json.encode(snapshot), type=Snapshot) == snapshot
    assert fitted(msgspec.structs.replace(MODEL, kind="pull", coefficients=(0.001, 1e-9))) == "1.0 ms + 1.00 GB/s"
