"""Which models this engine can page, and why it refuses others.

Paging needs KV that is the same for a token wherever it is used: full causal attention with per-head keys and values in
every layer. The check reads the config alone, so that a refusal comes before gigabytes are read.
"""

from collections.abc import Mapping
from typing import Any

from halfmoon.engine.contract import ModelUnsupported

_RECURRENT_KEYS = (
    "ssm_cfg",
    "state_size",
    "ssm_state_size",
    "lru_width",
    "mamba_d_state",
    "mamba_d_ssm",
    "linear_num_key_heads",
    "attention_hidden_size",
)
_ADVICE = "serve it with another engine, or choose a model with full attention (Llama, Qwen2, Qwen3, Mistral, SmolLM)"


def check_pageable(config: Mapping[str, Any]) -> None:
    """Raises `ModelUnsupported` with one sentence that says what stands in the way."""
    kind = config.get("model_type", "unknown")

    def refuse(why: str) -> None:
        raise ModelUnsupported(f"the torch engine can't page {kind}: {why}; {_ADVICE}")

    if config.get("is_encoder_decoder"):
        refuse("it is an encoder-decoder model")
    if config.get("kv_lora_rank"):
        refuse(f"its latent attention (MLA, kv_lora_rank {config['kv_lora_rank']}) keeps no keys and values per head")
    if recurrent := next((key for key in _RECURRENT_KEYS if config.get(key)), None):
        refuse(f"its layers keep recurrent state ({recurrent}), which belongs to a whole prefix and not to a token")
    layers = set(config.get("layer_types") or ())
    if other := sorted(layers - {"full_attention"}):
        refuse(f"some of its layers are {', '.join(other)}, and only full attention can be paged")
    window = config.get("sliding_window")
    uses_window = config.get("use_sliding_window", True) and not layers
    if window and uses_window and window < config.get("max_position_embeddings", 0):
        refuse(f"its attention slides over a window of {window} tokens")
