"""How `halfmoon doctor` judges what it found, and what it shows."""

import io

from rich.console import Console

from halfmoon.cli.doctor.report import (
    Check,
    Member,
    Pair,
    Report,
    Verdict,
    judge_clock,
    judge_members,
    judge_memory,
    judge_pairs,
)
from halfmoon.cli.doctor.screen import print_report
from halfmoon.schemas.ids import NodeId, WorkerId
from halfmoon.schemas.probes import Probed, ProbedPath

A, B = NodeId("node-a"), NodeId("node-b")
GOOD, WARNING, BAD = Verdict.GOOD, Verdict.WARNING, Verdict.BAD
WHOLE = ("gateway", "conductor", "registry", "kv-tier", "prefill", "decode")


def member(what: str, *, is_heard: bool = True, is_recorded: bool | None = True) -> Member:
    name = WorkerId(f"{what}-1")
    return Member(worker=name, what=what, state="serving", is_heard=is_heard, is_recorded=is_recorded)


def pair(chosen: str | None) -> Pair:
    paths = (
        ProbedPath(transport="shm", is_usable=False, reason="node-b is on host 'y'"),
        ProbedPath(
            transport="tcp", is_usable=chosen is not None, gb_per_s=2.5, num_bytes=64 << 20, slice_bytes=4 << 20
        ),
    )
    return Pair(reader=A, source=B, chosen=chosen, paths=paths)


def found(free_bytes: int) -> Probed:
    return Probed(
        node=A,
        epoch=1,
        host="h",
        now_ns=1,
        memory_dir="/dev/shm",
        memory_total_bytes=1000 << 20,
        memory_free_bytes=free_bytes,
    )


def test_a_whole_cluster_is_good_also_a_colocated_one() -> None:
    assert judge_members([member(what) for what in WHOLE]).verdict is GOOD
    colocated = [member(what) for what in (*WHOLE[:4], "colocated")]
    assert judge_members(colocated).verdict is GOOD


def test_who_is_missing_unknown_or_silent_is_named() -> None:
    without = judge_members([member(what) for what in WHOLE if what not in ("decode", "kv-tier")])
    assert (without.verdict, "kv-tier, decode" in without.detail) == (WARNING, True)
    unknown = judge_members([member(what, is_recorded=what != "decode") for what in WHOLE])
    assert (unknown.verdict, "decode-1" in unknown.detail) == (WARNING, True)
    silent = judge_members([member(what, is_heard=what != "prefill") for what in WHOLE])
    assert (silent.verdict, "prefill-1" in silent.detail) == (BAD, True)
    assert judge_members([]).verdict is BAD
    assert judge_members([member(what, is_recorded=None) for what in WHOLE]).verdict is GOOD


def test_a_clock_is_blamed_only_for_what_it_surely_differs_by() -> None:
    assert judge_clock(A, 0.09, 0.0).verdict is GOOD
    assert judge_clock(A, 0.3, 0.25).verdict is GOOD
    assert judge_clock(A, 0.3, 0.1).verdict is WARNING
    assert judge_clock(A, -5.0, 0.1).verdict is WARNING


def test_memory_that_is_nearly_full_is_a_warning() -> None:
    assert judge_memory(found(500 << 20)).verdict is GOOD
    full = judge_memory(found(10 << 20))
    assert (full.verdict, "/dev/shm" in full.detail) == (WARNING, True)


def test_a_pair_without_a_way_is_bad() -> None:
    assert judge_pairs([pair("tcp")], 2).verdict is GOOD
    assert judge_pairs([], 1).verdict is GOOD
    lost = judge_pairs([pair("tcp"), pair(None)], 2)
    assert (lost.verdict, "node-a from node-b" in lost.detail) == (BAD, True)
    assert not Report(checks=(lost,)).is_well


def test_the_screen_shows_choice_speed_and_why_not_the_others() -> None:
    checks = (Check(name="NATS", verdict=GOOD, detail="round trip [1] ms"), judge_pairs([pair("tcp")], 2))
    report = Report(checks=checks, members=tuple(member(what) for what in WHOLE), pairs=(pair("tcp"),))
    output = io.StringIO()
    print_report(Console(file=output, width=160), report)
    for words in (
        "tcp: 2.50 GB/s, 64 MiB in slots of 4,096 KiB",
        "shm: node-b is on host 'y'",
        "round trip [1] ms",
        "all is well",
    ):
        assert words in output.getvalue(), words
    assert "tcp" in next(line for line in output.getvalue().splitlines() if "node-a" in line and "node-b" in line)
