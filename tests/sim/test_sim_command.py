"""`halfmoon sim run`: its record, its words, and what it says of bad input."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from halfmoon.cli.app import app
from halfmoon.planner.recording_file import RecordingFile
from halfmoon.traces.recording import EndLine, ModelLine, RequestLine
from support.simulated import MOONCAKE

pytestmark = pytest.mark.timeout(300)
"""Seconds of computing each; beside other work on the same cores they take many times as long."""

TRACE = str(MOONCAKE / "conversation_trace.jsonl.xz")
SPREAD = {"mean", "p50", "p90", "p99"}
STABLE = {
    "ttft_s",
    "tbt_s",
    "e2e_s",
    "slo_attainment",
    "goodput_rps",
    "hit_ratio",
    "rejected",
    "wasted_prefills",
    "bytes_moved",
    "load_max_over_mean",
    "assumptions",
}


def _run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["sim", "run", *words])
    return result.exit_code, result.stdout, result.stderr


def _record(*words: str) -> dict[str, Any]:
    code, printed, _ = _run(*words, "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(printed)
    return found


def test_the_record_has_its_keys_and_says_that_it_is_simulated(tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    limits = ("--slo-ttft", "30", "--slo-tbt", "0.1", "--admission", "predictive")
    found = _record(TRACE, "--requests", "60", "--plot", str(pictures), *limits)
    assert found.keys() >= STABLE
    assert all(found[name].keys() == SPREAD for name in ("ttft_s", "tbt_s", "e2e_s"))
    assert found["simulated"] is True
    assert found["num_requests"] == found["num_finished"] == 60
    assert found["slo_attainment"] == 1.0
    assert found["bytes_moved"] == sum(found["bytes_moved_for"].values()) > 0
    assert len({len(column) for column in found["load"].values()}) == 1
    assert {picture.name for picture in pictures.iterdir()} == {"load.svg", "times.svg"}
    assert "simulated" in (pictures / "load.svg").read_text()


def test_in_words() -> None:
    code, printed, _ = _run(TRACE, "--requests", "20", "--colocated", "2", "--policy", "least_loaded")
    assert code == 0
    assert printed.startswith("simulated: 20 requests of conversation_trace.jsonl.xz on 2 colocated, least_loaded")
    assert "assumptions:\n- simulated: no model ran" in printed


def test_lengths_alone_are_enough(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.0319600,3180,8\n"
    )
    found = _record(str(path), "--model", "llama3-8b", "--hardware", "h100", "--gpus", "1")
    assert (found["num_finished"], found["hit_ratio"], found["hardware"]) == (2, 0.0, "1 × H100")


def test_a_recording_brings_its_own_machine(tmp_path: Path) -> None:
    """Prompts of 640 tokens in blocks of 64, chunks of 256: the second shares its two whole chunks with the first."""
    path = tmp_path / "recording.jsonl"
    with RecordingFile(path) as file:
        file.write(
            ModelLine(
                name="m",
                kv_bytes_per_token=1000,
                chunk_tokens=256,
                prefill_fit=(0.5, 0.01, 0.0),
                step_fit=(0.1, 0.0, 0.0),
                request_s=0.25,
                kv_tokens=50_000,
            )
        )
        for at_ms in (0, 60_000):
            file.write(
                RequestLine(
                    at_ms=at_ms,
                    model="m",
                    tenant="t",
                    prompt_tokens=640,
                    completion_tokens=2,
                    blocks=tuple(range(10)),
                )
            )
        file.write(EndLine(at_ms=70_000, num_requests=2, num_missed_messages=0, num_disconnects=0))
    one = ("--prefill", "1", "--decode", "1", "--chunk-tokens", "256")
    found = _record(str(path), "--hardware", "measured", *one)
    assert found["model"] == "m"
    assert found["hit_ratio"] == pytest.approx(512 / 1280)
    assert found["prefill_compute_s"] == pytest.approx((0.5 + 6.4) + (0.5 + 1.28))
    assert found["tbt_s"]["p50"] == pytest.approx(0.1)
    handed_s = 0.001 + 256 * 1000 / 1e9
    assert found["ttft_s"]["p99"] == pytest.approx(0.5 + 6.4 + handed_s + 0.25 + 0.1)
    assert any("services add 0.25 s to each first token" in each for each in found["assumptions"])


def test_a_config_of_ones_own(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 128,
                "vocab_size": 100,
            }
        )
    )
    found = _record(TRACE, "--requests", "5", "--model", str(config))
    assert found["model"] == tmp_path.name
    assert found["bytes_moved"] % (2 * 2 * 2 * 16 * 2) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("none.jsonl",), "none.jsonl can't be read: No such file"),
        ((TRACE, "--model", "gpt-9"), "there is no model 'gpt-9': expected one of llama2-70b"),
        ((TRACE, "--hardware", "B9"), "there is no hardware 'B9': expected one of A100"),
        ((TRACE, "--hardware", "measured"), "takes a recording of `halfmoon record`"),
        ((TRACE, "--prefill", "0"), "at least one instance each"),
        ((TRACE, "--admission", "early"), "judges by --slo-ttft and --slo-tbt"),
        ((TRACE, "--second-look"), "--second-look judges by --slo-tbt"),
        ((TRACE, "--chunk-tokens", "500"), "chunks must be a multiple"),
        ((TRACE, "--threshold", "0.5"), "must be at least 1"),
        ((TRACE, "--begin", "1000000"), "no requests in the stretch"),
        ((TRACE, "--model", "llama2-70b", "--gpus", "1"), "leave no room for KV"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(words: tuple[str, ...], says: str) -> None:
    code, printed, complaint = _run(*words)
    assert (code, printed) == (2, "")
    assert complaint.startswith("halfmoon sim: ")
    assert says in complaint
