"""Models of a simulation, by name or from a config of their own."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfmoon.models import ConfigUnusable, ModelFolderError, dtype_bytes, kv_shape, read_config
from halfmoon.models.flops import compute_shape
from halfmoon.sim.errors import SimError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    name: str
    weight_bytes: int
    flops_per_token: int
    """Of the linear layers."""
    flops_per_pair: int
    """Attention of one token to one other."""
    kv_bytes_per_token: int
    max_model_tokens: int
    vocab_size: int
    assumptions: tuple[str, ...] = ()


def _llama(
    *, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, **other: Any
) -> Mapping[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        **other,
    }


CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama2-70b": _llama(hidden=8192, layers=80, heads=64, kv_heads=8, ffn=28672, vocab=32000),
    "llama3-8b": _llama(hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256),
    "llama3-70b": _llama(hidden=8192, layers=80, heads=64, kv_heads=8, ffn=28672, vocab=128256),
    "qwen2.5-72b": _llama(hidden=8192, layers=80, heads=64, kv_heads=8, ffn=29568, vocab=152064),
    "qwen3-32b": _llama(hidden=5120, layers=64, heads=64, kv_heads=8, ffn=25600, vocab=151936, head_dim=128),
    "smollm2-135m": _llama(hidden=576, layers=30, heads=9, kv_heads=3, ffn=1536, vocab=49152, tie_word_embeddings=True),
}
"""Shapes as in the config.json that each was published with. `llama2-70b` is the dummy of Mooncake's experiments."""

_LONG_TOKENS = 1 << 20
"""Traces have longer prompts than some of these models were trained for; dummies of the same shape take them."""


def model_profile(name_or_path: str, dtype: str = "bfloat16") -> ModelProfile:
    """A named model, or one whose config.json or Hugging Face folder this is. Raises `SimError`."""
    config = CONFIGS.get(name_or_path)
    name = name_or_path
    if config is None:
        path = Path(name_or_path)
        if not path.exists():
            raise SimError(
                f"there is no model {name_or_path!r}: expected one of {', '.join(CONFIGS)}, or a path to a config.json "
                "or a Hugging Face folder"
            )
        try:
            config = read_config(path)
        except ModelFolderError as error:
            raise SimError(str(error)) from None
        name = path.parent.name if path.suffix == ".json" else path.name
    try:
        element = dtype_bytes(dtype)
        kv, compute = kv_shape(config), compute_shape(config)
    except (ConfigUnusable, ValueError) as error:
        raise SimError(f"{name_or_path}: {error}") from None
    max_tokens = config.get("max_position_embeddings")
    return ModelProfile(
        name=name,
        weight_bytes=compute.num_weights * element,
        flops_per_token=compute.flops_per_token,
        flops_per_pair=compute.flops_per_pair,
        kv_bytes_per_token=kv.bytes_per_token(element),
        max_model_tokens=max_tokens if isinstance(max_tokens, int) else _LONG_TOKENS,
        vocab_size=int(config["vocab_size"]),
        assumptions=(*compute.assumptions, f"weights and KV are {dtype}"),
    )
