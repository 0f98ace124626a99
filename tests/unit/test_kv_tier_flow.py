"""What is on its way to a pool, and what its time tells."""

from halfmoon.kv_tier.flow import MAX_SAMPLES, Flow
from halfmoon.schemas.ids import NodeId
from halfmoon.schemas.measurements import PullSample

A, B = NodeId("a"), NodeId("b")


def test_what_was_on_its_way_when_a_pull_began_is_told_with_its_time() -> None:
    flow = Flow()
    first = flow.begin(A, 100, 0)
    second = flow.begin(B, 50, 500_000_000)
    assert flow.receiving() == {A: 100, B: 50}
    first.end(1_000_000_000, is_whole=True)
    second.end(1_500_000_000, is_whole=True)
    assert flow.receiving() == {}
    assert flow.take() == (
        PullSample(source=A, num_bytes=100, duration_s=1.0),
        PullSample(source=B, num_bytes=50, duration_s=1.0, num_bytes_ahead=100),
    )
    assert flow.take() == ()


def test_a_pull_that_failed_in_part_tells_nothing() -> None:
    flow = Flow()
    flow.begin(A, 100, 0).end(1, is_whole=False)
    assert (flow.receiving(), flow.take()) == ({}, ())
    for at in range(100):
        flow.begin(A, 1, at).end(at + 1, is_whole=True)
    assert len(flow.take()) == MAX_SAMPLES
