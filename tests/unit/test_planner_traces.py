"""Trace files: each kind is told by its first line, and a bad line by its number."""

import json
from pathlib import Path

import pytest

from halfmoon.planner.recording_file import RecordingFile
from halfmoon.traces import TraceError, read_trace
from halfmoon.traces.recording import BLOCK_TOKENS, BlockHasher, EndLine, ModelLine, RequestLine

MOONCAKE = '{"timestamp": 27, "input_length": 600, "output_length": 5, "hash_ids": [4, 9]}\n'
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.0799600,34,8\n"
)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def recorded(path: Path, *lines: RequestLine | ModelLine | EndLine) -> Path:
    with RecordingFile(path) as file:
        for line in lines:
            file.write(line)
    return path


def line(at_ms: int, model: str = "m") -> RequestLine:
    return RequestLine(at_ms=at_ms, model=model, tenant="ab", prompt_tokens=70, completion_tokens=3, blocks=(11,))


END = EndLine(at_ms=9, num_requests=2, num_missed_messages=0, num_disconnects=0)


def test_mooncake(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "t", MOONCAKE))
    (request,) = trace.requests
    assert (trace.source, trace.block_tokens) == ("Mooncake", 512)
    assert (request.at_ms, request.prompt_tokens, request.blocks) == (27, 600, (4, 9))


def test_azure(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "t", AZURE))
    assert (trace.source, trace.block_tokens) == ("Azure", None)
    assert [(each.at_ms, each.prompt_tokens, each.blocks) for each in trace.requests] == [
        (0, 4808, None),
        (1100, 34, None),
    ]


def test_a_recording_is_read_back_sorted(tmp_path: Path) -> None:
    model = ModelLine(name="m", kv_bytes_per_token=10, chunk_tokens=256)
    faster = ModelLine(name="m", kv_bytes_per_token=10, chunk_tokens=256, prefill_tokens_per_s=5.0)
    trace = read_trace(recorded(tmp_path / "t", model, line(5), line(2), faster, END))
    assert [each.at_ms for each in trace.requests] == [2, 5]
    assert (trace.block_tokens, trace.models, trace.warnings) == (BLOCK_TOKENS, (faster,), ())


def test_a_recording_is_valid_at_any_byte(tmp_path: Path) -> None:
    path = recorded(tmp_path / "t", line(1), line(2), END)
    content = path.read_bytes()
    begin = content.index(b"\n") + 1
    first = content.index(b"\n", begin) + 1
    for cut in (first, first + 1, len(content) - 1):
        path.write_bytes(content[:cut])
        trace = read_trace(path)
        assert len(trace.requests) == content[:cut].count(b"\n") - 1
        assert any("broken off" in warning for warning in trace.warnings)


def test_what_was_missed_is_told(tmp_path: Path) -> None:
    end = EndLine(at_ms=9, num_requests=1, num_missed_messages=3, num_disconnects=1)
    (warning,) = read_trace(recorded(tmp_path / "t", line(1), end)).warnings
    assert "3 messages were missed" in warning


def test_one_model_is_looked_at(tmp_path: Path) -> None:
    path = recorded(tmp_path / "t", line(1, "m"), line(2, "n"), END)
    with pytest.raises(TraceError, match="choose one with --only: m, n"):
        read_trace(path)
    assert [each.at_ms for each in read_trace(path, model="n").requests] == [2]
    with pytest.raises(TraceError, match="no requests for x; it has m, n"):
        read_trace(path, model="x")


def test_an_existing_file_is_never_written_over(tmp_path: Path) -> None:
    path = written(tmp_path / "t", "precious")
    with pytest.raises(FileExistsError):
        RecordingFile(path)
    assert path.read_text() == "precious"


HEADER = {"kind": "header", "format": "halfmoon-requests", "version": 1, "block_tokens": 64, "started": "now"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("hello\n", "line 1: neither a recording"),
        (MOONCAKE + "{}\n", "line 2: Object missing required field `timestamp`"),
        (MOONCAKE + MOONCAKE.replace("600", "6000"), "line 2: 2 hash_ids for 6000 tokens, where blocks of 512 make 12"),
        (AZURE + "yesterday,1,2\n", "line 4: expected a time and two numbers, found 'yesterday,1,2'"),
        (AZURE.split("\n")[0] + "\n", "has no requests"),
        (json.dumps({**HEADER, "version": 2}) + "\n", "version 2 can't be read, only 1"),
        (json.dumps({**HEADER, "format": "x"}) + "\n", "line 1: expected the header"),
        (json.dumps(HEADER) + '\n{"kind": "request"}\n', "line 2: Object missing required field"),
        (json.dumps(HEADER) + "\n" + json.dumps(HEADER) + "\n", "line 2: a second header"),
        (json.dumps(HEADER) + "\n", "has no requests"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(written(tmp_path / "t", text))


def test_hashes_are_chained_keyed_and_small() -> None:
    hasher = BlockHasher(b"1" * 32)
    tokens = list(range(200))
    blocks = hasher.blocks(b"root", tokens)
    assert len(blocks) == 200 // BLOCK_TOKENS
    assert blocks[:2] == hasher.blocks(b"root", tokens[:130])
    changed = hasher.blocks(b"root", [*tokens[:64], 999, *tokens[65:]])
    assert changed[0] == blocks[0]
    assert not set(changed[1:]) & set(blocks)
    assert not set(blocks) & set(BlockHasher(b"2" * 32).blocks(b"root", tokens))
    assert not set(blocks) & set(hasher.blocks(b"other root", tokens))
    assert all(0 <= block < 2**53 for block in blocks)
    assert hasher.name("acme") != BlockHasher(b"2" * 32).name("acme")
