"""Architectures that the torch engine serves: greedy tokens are `generate`'s. And some that a step unmasks."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from halfmoon.engine.contract import ModelUnsupported
from halfmoon.engine.factory import kv_bytes_per_token
from halfmoon.engine.torch.probe import check_pages
from halfmoon.engine.torch.weights import load_model
from halfmoon.models import ModelFolder, ModelFolderError
from halfmoon.schemas.requests import Sampling
from support.engines import generated, prefilled, started, token_ids
from support.tiny_models import TINY, tiny_model

CHUNK_TOKENS = 8
MAX_TOKENS = 5
GREEDY = Sampling(temperature=0.0, max_tokens=MAX_TOKENS)
ARCHITECTURES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True, "attention_bias": True}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 16}),
    ("qwen3", {"head_dim": 16}),
    ("mistral", {"sliding_window": None, "head_dim": 8}),
]


def reference(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    config = GenerationConfig(do_sample=False, max_new_tokens=MAX_TOKENS, pad_token_id=0)
    reference.generation_config = config
    return [
        reference.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)))[0, len(prompt) :].tolist()
        for prompt in prompts
    ]


@pytest.mark.parametrize(("model_type", "changes"), ARCHITECTURES, ids=lambda value: str(value)[:40])
async def test_tokens_are_those_of_generate(tmp_path: Path, model_type: str, changes: dict[str, Any]) -> None:
    model = tiny_model(tmp_path, model_type, **changes)
    generator = random.Random(5)
    prompts = [[generator.randrange(3, TINY["vocab_size"]) for _ in range(count)] for count in (1, 7, 8, 9, 31)]
    expected = reference(model, prompts)
    assert len({tuple(tokens) for tokens in expected}) == len(prompts), "weights that say the same to all test nothing"
    async with started("torch", model, chunk_tokens=CHUNK_TOKENS, kv_tokens=256) as engine:
        assert engine.card.kv_bytes_per_token == kv_bytes_per_token("torch", model, "auto")
        together = await asyncio.gather(
            *(generated(engine, prompt, GREEDY, seq_id=f"s{at}") for at, prompt in enumerate(prompts))
        )
        assert [token_ids(answer) for answer in together] == expected
        for prompt, tokens in zip(prompts, expected, strict=True):
            loaded = await prefilled(engine, prompt)
            assert token_ids(await generated(engine, prompt, GREEDY, loaded=loaded)) == tokens


async def test_bfloat16_halves_the_kv(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "llama")
    async with started("torch", model, chunk_tokens=CHUNK_TOKENS, kv_tokens=256, dtype="bfloat16") as engine:
        assert engine.card.kv_dtype == "bfloat16"
        assert engine.card.kv_bytes_per_token == kv_bytes_per_token("torch", model, "bfloat16")
        assert 2 * engine.card.kv_bytes_per_token == kv_bytes_per_token("torch", model, "float32")
        prompt = list(range(3, 30))
        loaded = await prefilled(engine, prompt)
        assert token_ids(await generated(engine, prompt, GREEDY, loaded=loaded)) == token_ids(
            await generated(engine, prompt, GREEDY)
        )


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("falcon", {}), ("xlstm", {})],
)
async def test_what_only_a_step_unmasks_is_refused(tmp_path: Path, model_type: str, changes: dict[str, Any]) -> None:
    model = tiny_model(tmp_path, model_type, **changes)
    with pytest.raises(ModelUnsupported, match="serve it with another engine"):
        async with started("torch", model, chunk_tokens=CHUNK_TOKENS, kv_tokens=256):
            pass


async def test_a_sliding_window_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "mistral", sliding_window=16)
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelUnsupported, match="slides over a window of 16 tokens"):
        async with started("torch", model):
            pass


async def test_weights_that_are_missing_or_of_other_shapes_are_told(tmp_path: Path) -> None:
    """transformers would put random numbers in their place and go on."""
    model = tiny_model(tmp_path, "llama")
    file, name = model / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    weights = load_file(file)
    for weight, message in [(None, f"lacks 1 weights, the first is {name}"), (torch.zeros(3, 3), "other shapes")]:
        changed = {key: value for key, value in {**weights, name: weight}.items() if value is not None}
        save_file(changed, file, metadata={"format": "pt"})
        with pytest.raises(ModelFolderError, match=message):
            async with started("torch", model):
                pass


def test_a_layer_that_keeps_nothing_is_found_by_a_step(tmp_path: Path) -> None:
    class Idle(torch.nn.Module):
        def forward(self, hidden: torch.Tensor, **_: object) -> torch.Tensor:
            return hidden

    folder, cpu = ModelFolder.open(tiny_model(tmp_path, "llama")), torch.device("cpu")
    model = load_model(folder, dtype=torch.float32, device=cpu, progress=lambda done: None)
    check_pages(model, folder.geometry, torch.float32, cpu)
    model.model.layers[1] = Idle()
    with pytest.raises(ModelUnsupported, match="of its 3 layers, 2 keep keys and values"):
        check_pages(model, folder.geometry, torch.float32, cpu)
