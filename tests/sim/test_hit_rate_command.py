"""`halfmoon sim hit-rate`: what it prints, and what it says of bad input."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfmoon.cli.app import app

_GOOD = '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1]}'


def _run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["sim", "hit-rate", *words])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [(0, 1024, [0, 1]), (1, 1500, [0, 1, 2]), (2, 512, [3]), (2, 1024, [0, 4]), (9.5, 1024, [0, 1])]
    path.write_text(
        "".join(
            json.dumps({"timestamp": at_ms, "input_length": length, "output_length": 1, "hash_ids": blocks}) + "\n"
            for at_ms, length, blocks in lines
        )
    )
    return path


@pytest.mark.parametrize(
    ("policy", "blocks", "hits"), [("lru", "3", 4), ("belady", "3", 5), ("belady", "1", 3), ("lru", None, 5)]
)
def test_json(trace: Path, policy: str, blocks: str | None, hits: int) -> None:
    bound = () if blocks is None else ("--blocks", blocks)
    code, printed, complaint = _run(str(trace), "--policy", policy, *bound, "--json")
    assert (code, complaint) == (0, "")
    assert json.loads(printed) == {
        "policy": policy,
        "blocks": None if blocks is None else int(blocks),
        "references": 10,
        "unique": 5,
        "hit_ratio": hits / 10,
        "prefix_hit_ratio": hits / 10,
    }


def test_in_words_and_by_default_with_the_default_policy(trace: Path) -> None:
    code, printed, _ = _run(str(trace), "--blocks", "100")
    assert code == 0
    assert printed.startswith("simulated, 100 blocks under prefix_aware: 5 of 10 blocks hit (0.5000)")


def test_a_policy_that_is_none(trace: Path) -> None:
    code, printed, complaint = _run(str(trace), "--policy", "fifo")
    assert (code, printed) == (2, "")
    assert "no policy 'fifo'" in complaint
    assert "prefix_aware, lru, lfu, length_aware, arc, s3_fifo, belady" in complaint


def test_a_trace_that_is_none(tmp_path: Path) -> None:
    code, _, complaint = _run(str(tmp_path / "none.jsonl"))
    assert code == 2
    assert complaint == f"halfmoon sim: {tmp_path / 'none.jsonl'} can't be read: No such file or directory\n"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("no json", "malformed"),
        ("\xff", "expected {"),
        ('{"timestamp": 0, "input_length": 512}', "missing required field `hash_ids`"),
        ('{"timestamp": 0, "input_length": 512, "hash_ids": ["a"]}', "Expected `int`, got `str`"),
        ('{"timestamp": -1, "input_length": 512, "hash_ids": [1]}', "timestamp ≥ 0"),
        ('{"timestamp": 0, "input_length": 513, "hash_ids": [1]}', "1 hash_ids for 513 tokens, where"),
        ('{"timestamp": 0, "input_length": 1024, "hash_ids": [1, 1]}', "all different"),
    ],
)
def test_a_line_that_is_wrong(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(f"{_GOOD}\n\n".encode() + line.encode("latin-1", "replace" if "≥" in line else "strict") + b"\n")
    code, printed, complaint = _run(str(path))
    assert (code, printed) == (2, "")
    assert f"{path}, line 3: " in complaint
    assert says in complaint


def test_a_trace_that_is_out_of_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(_GOOD.replace('"timestamp": 0', '"timestamp": 5') + "\n" + _GOOD + "\n")
    code, _, complaint = _run(str(path))
    assert code == 2
    assert "line 2: its timestamp is earlier" in complaint


@pytest.mark.parametrize(("name", "content"), [("empty.jsonl", b""), ("torn.jsonl.xz", b"no xz")])
def test_a_file_without_prompts(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    code, _, complaint = _run(str(path))
    assert code == 2
    assert "expected" in complaint


def test_a_pool_without_room(trace: Path) -> None:
    code, _, complaint = _run(str(trace), "--blocks", "0")
    assert code == 2
    assert "--blocks" in complaint
