"""`halfmoon advise`: what it prints, writes and refuses."""

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from halfmoon.cli.advise_text import parse_bytes, show_bytes
from halfmoon.cli.app import app
from support.gguf_file import write_gguf

LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
}
TRACE = "".join(
    json.dumps({"timestamp": at, "input_length": 1024, "output_length": 1, "hash_ids": [1, at]}) + "\n"
    for at in (2, 3, 4)
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_70B))
    return tmp_path / "model"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE)
    return path


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["advise", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def asked(*arguments: object) -> dict[str, Any]:
    return dict(json.loads(run(*arguments, "--json")))


def test_70b_in_fp16_has_327_680_bytes_a_token(model: Path) -> None:
    for path in (model, model / "config.json"):
        found = asked("kv-size", "--model", path, "--dtype", "fp16", "--tensor-parallel", 4)
        assert (found["bytes_per_token"], found["rank_bytes_per_token"]) == (327_680, 81_920)
        assert [each["num_bytes"] for each in found["contexts"]] == [n * 327_680 for n in (4096, 32_768, 131_072)]
    assert "327,680 bytes a token" in run("kv-size", "--model", model, "--dtype", "fp16")


def test_what_an_arena_holds(model: Path) -> None:
    found = asked("kv-size", "--model", model, "--dtype", "fp16", "--arena-bytes", "256GiB")["arena"]
    assert (found["slot_bytes"], found["num_chunks"]) == (256 * 327_680, 3276)
    assert "3,276 chunks of 256 tokens" in run("kv-size", "--model", model, "--arena-bytes", "256GiB")


def test_the_element_type_is_the_configs_or_said_to_be_assumed(model: Path) -> None:
    assert "float16 is assumed" in asked("kv-size", "--model", model)["assumptions"][0]
    (model / "config.json").write_text(json.dumps({**LLAMA_70B, "torch_dtype": "float32"}))
    assert asked("kv-size", "--model", model)["bytes_per_token"] == 2 * 327_680
    assert asked("kv-size", "--model", model, "--dtype", "fp8")["bytes_per_token"] == 327_680 // 2


def test_gguf(tmp_path: Path) -> None:
    plain = write_gguf(tmp_path / "plain.gguf", "llama", layers=4, heads=8, kv_heads=2, key_length=16)
    assert asked("kv-size", "--model", plain, "--dtype", "fp16")["bytes_per_token"] == 2 * 4 * 2 * 16 * 2
    latent = write_gguf(tmp_path / "mla.gguf", "deepseek2", layers=4, heads=8, kv_heads=1, kv_lora_rank=512, rope=64)
    found = asked("kv-size", "--model", latent, "--dtype", "fp16")
    assert (found["attention"], found["bytes_per_token"]) == ("latent (MLA)", 4 * 576 * 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kv-size", "--model", "/nowhere"], "there is no model at /nowhere"),
        (["chunk-size"], "give either --trace FILE or --url NATS_URL"),
        (["chunk-size", "--trace", "/nowhere"], "/nowhere can't be read: No such file"),
        (["chunk-size", "--trace", "x", "--sizes", "0"], "no list of token counts"),
        (["kv-size", "--model", "x", "--arena-bytes", "lots"], "'lots' is no size"),
    ],
)
def test_refusals(arguments: list[str], message: str) -> None:
    assert message in " ".join(run(*arguments, code=2).replace("│", " ").split())


def test_chunk_sizes_from_a_trace(trace: Path, model: Path) -> None:
    found = asked("chunk-size", "--trace", trace, "--model", model, "--dtype", "fp16")
    assert (found["num_requests"], found["prompt_tokens"], found["block_tokens"]) == (3, 3072, 512)
    last = found["sizes"][-1]
    assert (last["reuse"], last["num_records"]) == ({"low": 1 / 3, "high": 1 / 3}, {"low": 4, "high": 4})
    assert last["chunk_bytes"] == 512 * 327_680
    printed = run("chunk-size", "--trace", trace)
    assert "33.3%" in printed
    assert found["sentence"].split(".")[0] in " ".join(printed.split())


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_pictures(trace: Path, tmp_path: Path, suffix: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"chunks{suffix}"
    run("chunk-size", "--trace", trace, "--plot", picture)
    assert picture.read_bytes().startswith(magic)
    assert "pictures end with" in run("chunk-size", "--trace", trace, "--plot", tmp_path / "chunks.doc", code=2)


def test_without_matplotlib_the_extra_is_named(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", absent)
    output = run("chunk-size", "--trace", trace, "--plot", tmp_path / "chunks.png", code=2)
    assert "pip install 'halfmoon[plots]'" in output


def test_sizes_are_read_and_shown_in_units() -> None:
    assert [parse_bytes(text) for text in ("512", "64GiB", "1.5 kb", "2MiB")] == [512, 64 << 30, 1500, 2 << 20]
    assert [show_bytes(size) for size in (512, 327_680, 40 << 30, 3 << 41)] == [
        "512 B",
        "320 KiB",
        "40.0 GiB",
        "6.00 TiB",
    ]
