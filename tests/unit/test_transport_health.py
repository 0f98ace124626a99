"""Paths' health: failures set them aside, longer each time; one batch at a time finds out whether they are back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.schemas.ids import NodeId
from halfmoon.transport.health import Backoff, HealthTable

PEER, EPOCH, TCP = NodeId("peer"), 5, "tcp"
AT = (PEER, EPOCH, TCP)
S = 1_000_000_000


def failing(table: HealthTable, now_ns: int, jitter: float = 0.0) -> None:
    table.begin(*AT)
    table.failed(*AT, "refused", now_ns=now_ns, jitter=jitter)


def working(table: HealthTable, num_bytes: int = 0, elapsed_ns: int = 1) -> None:
    table.begin(*AT)
    table.succeeded(*AT, num_bytes=num_bytes, elapsed_ns=elapsed_ns)


def test_a_path_never_tried_is_to_be_used() -> None:
    assert HealthTable().set_aside(*AT, now_ns=0) is None


def test_a_failure_sets_aside_and_each_further_one_twice_as_long_up_to_the_limit() -> None:
    table, now_ns = HealthTable(Backoff(first_s=1.0, max_s=5.0)), 100 * S
    for pause_s in (1, 2, 4, 5, 5):
        failing(table, now_ns)
        assert "refused" in (table.set_aside(*AT, now_ns=now_ns + pause_s * S - 1) or "")
        now_ns += pause_s * S
        assert table.set_aside(*AT, now_ns=now_ns) is None
    working(table)
    failing(table, now_ns)
    assert table.set_aside(*AT, now_ns=now_ns + S) is None, "a success in between begins anew"
    assert table.paths()[PEER, TCP].num_failures == table.paths()[PEER, TCP].num_set_asides == 6


def test_one_batch_tries_again_while_the_others_wait_for_it() -> None:
    table = HealthTable(Backoff(first_s=1.0))
    failing(table, 0)
    assert table.set_aside(*AT, now_ns=S) is None
    table.begin(*AT)
    assert "tried again" in (table.set_aside(*AT, now_ns=S) or "")
    table.gave_up(*AT)
    assert table.set_aside(*AT, now_ns=S) is None, "a cancelled try tells nothing"
    working(table)
    assert table.set_aside(*AT, now_ns=S) is None


def test_batches_that_were_under_way_when_it_broke_are_one_failure() -> None:
    table = HealthTable(Backoff(first_s=1.0))
    for _ in range(4):
        table.begin(*AT)
    for _ in range(4):
        table.failed(*AT, "reset", now_ns=0, jitter=0.0)
    path = table.paths()[PEER, TCP]
    assert (path.num_failures, path.num_set_asides, path.set_aside_until_ns) == (4, 1, S)


def test_two_deadlines_are_a_failure_unless_there_was_hardly_any_time() -> None:
    table = HealthTable()
    for elapsed_ns in (1_000, 1_000, 1_000, S):
        table.begin(*AT)
        table.timed_out(*AT, "slow", now_ns=0, elapsed_ns=elapsed_ns, jitter=0.0)
        assert table.set_aside(*AT, now_ns=0) is None
    table.begin(*AT)
    table.timed_out(*AT, "slow", now_ns=0, elapsed_ns=S, jitter=0.0)
    assert "slow" in (table.set_aside(*AT, now_ns=0) or "")


def test_a_deadline_of_the_batch_that_tries_again_is_a_whole_failure() -> None:
    table = HealthTable(Backoff(first_s=1.0))
    failing(table, 0)
    table.begin(*AT)
    table.timed_out(*AT, "hangs", now_ns=2 * S, elapsed_ns=S, jitter=0.0)
    assert "failure 2 in a row: hangs" in (table.set_aside(*AT, now_ns=2 * S) or "")


def test_a_success_between_two_deadlines_forgives_the_first() -> None:
    table = HealthTable()
    for _ in range(3):
        table.begin(*AT)
        table.timed_out(*AT, "slow", now_ns=0, elapsed_ns=S, jitter=0.0)
        working(table)
    assert table.set_aside(*AT, now_ns=0) is None


def test_a_restarted_peer_is_judged_anew_and_a_late_word_about_its_former_life_is_not_mistaken() -> None:
    table = HealthTable()
    failing(table, 0)
    assert table.set_aside(PEER, EPOCH + 1, TCP, now_ns=0) is None
    table.begin(PEER, EPOCH + 1, TCP)
    table.succeeded(PEER, EPOCH + 1, TCP, num_bytes=8, elapsed_ns=1)
    path = table.paths()[PEER, TCP]
    assert (path.epoch, path.num_failures, path.num_bytes) == (EPOCH + 1, 1, 8)
    assert table.set_aside(PEER, EPOCH + 1, TCP, now_ns=0) is None


def test_bandwidth_is_a_running_estimate_of_reads_that_are_large_enough() -> None:
    table = HealthTable()
    working(table, 4096, 1)
    assert table.paths()[PEER, TCP].gb_per_s is None
    working(table, 8 * S, 2 * S)
    assert table.paths()[PEER, TCP].gb_per_s == 4.0
    working(table, 8 * S, S)
    assert table.paths()[PEER, TCP].gb_per_s == pytest.approx(5.0)
    path = table.paths()[PEER, TCP]
    assert path.num_bytes == 16 * S + 4096
    assert path.busy_s == pytest.approx(3.0)


@given(failures=st.integers(1, 10_000), jitter=st.floats(0, 1, exclude_max=True))
def test_a_pause_lies_between_half_and_all_of_its_doubling(failures: int, jitter: float) -> None:
    backoff = Backoff(first_s=0.25, max_s=30.0)
    longest_s = min(30.0, 0.25 * 2 ** min(failures - 1, 20))
    assert longest_s / 2 * S - 1 <= backoff.pause_ns(failures, jitter) <= longest_s * S


def test_the_table_is_bounded() -> None:
    table = HealthTable()
    for number in range(5000):
        table.begin(NodeId(f"node-{number}"), 1, TCP)
    assert len(table.paths()) <= 1024
    assert (NodeId("node-4999"), TCP) in table.paths()


@given(st.lists(st.tuples(st.sampled_from(["ok", "fail", "slow", "cancel"]), st.integers(0, 40)), max_size=60))
def test_whatever_happens_a_path_comes_back_within_its_longest_pause(events: list[tuple[str, int]]) -> None:
    table, now_ns = HealthTable(Backoff(first_s=0.25, max_s=8.0)), 0
    for event, pause_s in events:
        now_ns += pause_s * S
        if table.set_aside(*AT, now_ns=now_ns) is None:
            table.begin(*AT)
            if event == "ok":
                table.succeeded(*AT, num_bytes=1, elapsed_ns=1)
            elif event == "fail":
                table.failed(*AT, "f", now_ns=now_ns, jitter=0.5)
            elif event == "slow":
                table.timed_out(*AT, "s", now_ns=now_ns, elapsed_ns=S, jitter=0.5)
            else:
                table.gave_up(*AT)
            if event == "ok":
                assert table.set_aside(*AT, now_ns=now_ns) is None
            if event == "fail":
                assert table.set_aside(*AT, now_ns=now_ns) is not None
        assert table.set_aside(*AT, now_ns=now_ns + 8 * S) is None
