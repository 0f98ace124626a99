"""Models with random weights, small enough to make in a test: real architectures, no sense."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def tiny_model(folder: Path, model_type: str, **changes: Any) -> Path:
    """Saved as `save_pretrained` does. The same weights every time."""
    config = AutoConfig.for_model(model_type, **{**TINY, **changes})
    state = torch.get_rng_state()
    try:
        torch.manual_seed(17)
        model = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_rng_state(state)
    # Fresh weights are so small that all tokens would be about as likely.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    model.save_pretrained(folder)
    return folder
