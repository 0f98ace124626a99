"""A whole request over rdma, from the gateway's HTTP to the trace: prefill on one node, decode on another."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from halfmoon.engine.sim.tokens import completion_seed, completion_token, prompt_kv
from halfmoon.tracing import attributes, names
from halfmoon.tracing.store import TraceStore
from support.system import System, clean_environ
from support.tiny_tokenizer import byte_level
from support.wait import until_blocking

pytestmark = [pytest.mark.nightly, pytest.mark.nats, pytest.mark.etcd, pytest.mark.timeout(500)]

CHUNK_TOKENS = 64
VOCABULARY = 400
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
}
PROMPT = "hello moon, the quick brown fox jumps over the lazy dog. " * 12
MAX_TOKENS = 12
START_S = 300.0
"""Ten processes, where the processor is emulated."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a config: all that the simulated engine needs."""
    folder = byte_level(tmp_path_factory.mktemp("models") / "tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def system(device: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    options = ("--engine=sim", "--arena-mib=4", f"--chunk-tokens={CHUNK_TOKENS}", "--transport=rdma")
    system = System.start(tmp_path_factory.mktemp("system"), model, *options, timeout_s=START_S)
    yield system
    assert system.stop() == 0


def expected_text(model: Path) -> str:
    """What the engine says where it has the prompt's KV, every byte of it."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokens: Sequence[int] = tokenizer.encode(PROMPT).ids
    seed = completion_seed(b"".join(prompt_kv(tokens)))
    return str(tokenizer.decode([completion_token(seed, position, VOCABULARY) for position in range(MAX_TOKENS)]))


def ask(system: System) -> tuple[str, dict[str, Any]]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}
    answer = httpx.post(f"{system.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-request-id"], answer.json()


def moved(system: System, request_id: str) -> list[dict[str, object]]:
    """What the trace tells of each chunk that came from another node."""
    with TraceStore(system.data_dir / "traces.db") as store:
        spans = store.spans_of_request(request_id)
    return [
        dict(span.attributes)
        for span in spans
        if span.name == names.CHUNK and span.attributes.get(attributes.CHUNK_OUTCOME) == "hit_remote"
    ]


def test_what_prefill_computed_reaches_decode_over_rdma_and_the_text_is_right(system: System, model: Path) -> None:
    request_id, answer = ask(system)
    assert answer["choices"][0]["text"] == expected_text(model)
    num_chunks = -(-answer["usage"]["prompt_tokens"] // CHUNK_TOKENS)
    assert num_chunks > 3
    until_blocking(lambda: len(moved(system, request_id)) >= num_chunks, 30, what="every chunk is in the trace")
    assert {chunk[attributes.CHUNK_TRANSPORT] for chunk in moved(system, request_id)} == {"rdma"}
    _, again = ask(system)
    assert again["choices"][0]["text"] == answer["choices"][0]["text"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_the_doctor_says_that_rdma_is_used(system: System) -> None:
    command = [sys.executable, "-m", "halfmoon.cli.app", "doctor", "--json", f"--data-dir={system.data_dir}"]
    done = subprocess.run(command, env=clean_environ(), capture_output=True, text=True, timeout=120)
    pairs = json.loads(done.stdout)["pairs"]
    assert len(pairs) == 2
    for pair in pairs:
        assert pair["chosen"] == "rdma", pair
        paths = {path["transport"]: path for path in pair["paths"]}
        assert paths["rdma"]["gb_per_s"] > 0
