"""Prefetching over a trace: what it brings is used where it follows, and at high confidence nothing is brought."""

import json
from pathlib import Path

from typer.testing import CliRunner

from halfmoon.cli.app import app
from halfmoon.sim.prefetch import replay_prefetch
from halfmoon.sim.trace import TracePrompt

SECOND = 1_000_000_000


def visits(num_visits: int) -> list[TracePrompt]:
    """Prompts that go on from block 1 to 2, five at a time; every fifth doesn't, and goes where nobody is yet."""
    return [
        TracePrompt(at // 5 * SECOND, (1, 1000 + at) if at % 5 == 4 else (1, 2, 1000 + at), True)
        for at in range(num_visits)
    ]


def test_nothing_is_brought_at_a_confidence_that_nothing_reaches() -> None:
    for confidence in (1.0, 0.9):
        count = replay_prefetch(visits(60), num_nodes=2, capacity=20, confidence=confidence)
        assert (count.prefetched, count.used, count.wasted) == (0, 0, 0)
    assert count.references == 60 * 3 - 12


def test_what_is_brought_is_used_wasted_or_still_there() -> None:
    trace = [*visits(60), *(TracePrompt(at * SECOND, (5000 + at, 6000 + at), True) for at in range(60, 120))]
    count = replay_prefetch(trace, num_nodes=5, capacity=4, confidence=0.5)
    assert count.prefetched > 0
    assert count.prefetched == count.used + count.wasted
    assert count.local + count.remote <= count.references


def test_the_command_prints_the_same_in_words_and_as_json(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = (
        {"timestamp": at * 1000, "input_length": 1024, "output_length": 1, "hash_ids": [1, 10 + at]} for at in range(9)
    )
    trace.write_text("\n".join(map(json.dumps, lines)))
    run = CliRunner().invoke(app, ["sim", "prefetch", str(trace), "--nodes", "2", "--blocks", "50", "--json"])
    found = json.loads(run.stdout)
    assert (found["nodes"], found["references"], found["prefetched"]) == (2, 18, 0)
    words = CliRunner().invoke(app, ["sim", "prefetch", str(trace), "--nodes", "2", "--blocks", "50"])
    assert words.stdout.startswith("simulated, 2 pools of 50 blocks")
    assert CliRunner().invoke(app, ["sim", "prefetch", str(tmp_path / "none")]).exit_code == 2
