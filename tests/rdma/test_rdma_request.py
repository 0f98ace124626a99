"""Requests whose prompt is computed on one node and answered on another, with the KV moved over rdma. On real NATS."""

import json
from pathlib import Path

import pytest

from halfmoon.engine.sim import SimEngine, SimEngineConfig
from halfmoon.engine.sim.tokens import completion_seed, completion_token, prompt_kv
from halfmoon.schemas.requests import Sampling
from halfmoon.tracing import attributes
from support.buses import BusMaker
from support.tiny_tokenizer import byte_level
from support.workers import cluster, prompt

pytestmark = [pytest.mark.nats, pytest.mark.timeout(200)]

CHUNK_TOKENS = 256
VOCABULARY = 400
MAX_TOKENS = 8
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


def engine(folder: Path) -> SimEngine:
    model = byte_level(folder)
    (model / "config.json").write_text(json.dumps(CONFIG))
    return SimEngine(SimEngineConfig(model=model, name="exact", chunk_tokens=CHUNK_TOKENS, decode_step_s=0.001))


def completion(tokens: list[int]) -> list[int]:
    """What the engine says where it has the prompt's KV, every byte of it."""
    seed = completion_seed(b"".join(prompt_kv(tokens)))
    return [completion_token(seed, position, VOCABULARY) for position in range(MAX_TOKENS)]


@pytest.mark.parametrize("windows", [True, False], ids=["windows", "one-key"])
async def test_prompts_are_computed_on_one_node_and_answered_on_another(
    tmp_path: Path, nats_buses: BusMaker, windows: bool
) -> None:
    pools: dict[str, object] = {"rdma": "on", "rdma_windows": windows}
    async with cluster(
        tmp_path,
        host_b="host-2",
        pool_settings=pools,
        prefill_engine=engine(tmp_path / "prefill"),
        decode_engine=engine(tmp_path / "decode"),
        connect=nats_buses,
    ) as pair:
        for length in (CHUNK_TOKENS - 1, 3 * CHUNK_TOKENS + 10):
            tokens = prompt(length, first=length)
            before = len(pair.chunk_spans("decode"))
            _, _, reader = await pair.submit(tokens, sampling=Sampling(max_tokens=MAX_TOKENS))
            await reader.finished()
            assert reader.tokens == completion(tokens)
            await pair.idle()
            moved = [dict(span.attributes or {}) for span in pair.chunk_spans("decode")[before:]]
            assert [chunk[attributes.CHUNK_OUTCOME] for chunk in moved] == ["hit_remote"] * -(-length // CHUNK_TOKENS)
            assert {chunk[attributes.CHUNK_TRANSPORT] for chunk in moved} == {"rdma"}
        assert pair.failures == []
