"""Which models the torch engine takes, from their configs alone."""

from typing import Any

import pytest
from transformers import AutoConfig

from halfmoon.engine.contract import ModelUnsupported
from halfmoon.engine.torch.support import check_pageable

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
}


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    """A config as transformers itself writes it."""
    config: dict[str, Any] = AutoConfig.for_model(model_type, **{**TINY, **changes}).to_dict()
    return config


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("qwen2", {}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 1024}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 4}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 4096}),
        ("olmo2", {}),
    ],
)
def test_full_attention_is_taken(model_type: str, changes: dict[str, Any]) -> None:
    check_pageable(config_of(model_type, **changes))


def test_a_config_as_published_with_an_unused_window_is_taken() -> None:
    """Qwen2's own config.json has no layer_types."""
    check_pageable({**TINY, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 1024})


@pytest.mark.parametrize(
    ("model_type", "changes", "why"),
    [
        ("mistral", {"sliding_window": 1024}, "slides over a window of 1024 tokens"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 2}, "sliding_attention"),
        ("gemma2", {"sliding_window": 512}, "sliding_attention"),
        ("deepseek_v3", {"kv_lora_rank": 16, "q_lora_rank": 16}, "latent attention"),
        ("mamba", {"state_size": 8}, "recurrent state"),
        ("falcon_h1", {}, "recurrent state"),
        ("rwkv", {}, "recurrent state"),
        ("t5", {"d_model": 32}, "encoder-decoder"),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "some of its layers are conv"),
        ("nemotron_h", {}, "recurrent state"),
        ("recurrent_gemma", {}, "recurrent state"),
        ("qwen3_next", {}, "recurrent state"),
    ],
)
def test_what_cannot_be_paged_is_refused_with_the_reason(model_type: str, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelUnsupported) as refusal:
        check_pageable(config_of(model_type, **changes))
    sentence = str(refusal.value)
    assert why in sentence
    assert model_type in sentence
    assert "choose a model with full attention" in sentence
    assert "\n" not in sentence
