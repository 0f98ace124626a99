"""How much a model computes and weighs, read from its config. Pure.

a token                2 FLOPs per weight that it passes (Kaplan et al., arXiv:2001.08361, section 2.1)
attention to a token   2 · heads · (key dim + value dim), per layer
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halfmoon.models.kv_layers import ConfigUnusable, kv_shape
from halfmoon.models.kv_size import LayerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeShape:
    num_weights: int
    active_weights: int
    """Those that one token passes: of experts, only as many as it is sent to; embeddings are looked up."""
    flops_per_pair: int
    """Attention of one token to one other, over all layers."""
    assumptions: tuple[str, ...] = ()

    @property
    def flops_per_token(self) -> int:
        return 2 * self.active_weights


def compute_shape(config: Mapping[str, Any]) -> ComputeShape:
    """Raises `ConfigUnusable` for a model whose layers aren't attention and gated linear ones."""
    kv = kv_shape(config)
    if any(group.kind is LayerKind.RECURRENT for group in kv.groups):
        raise ConfigUnusable(f"{config.get('model_type')} has recurrent layers: what they compute isn't known here")
    if isinstance(config.get("text_config"), Mapping) and "num_hidden_layers" not in config:
        config = config["text_config"]
    notes = list(kv.assumptions)
    if kv.has_windows:
        notes.append("attention within windows is counted as attention to everything")
    layers, hidden, heads = (_need(config, key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    attention, pair = _attention(config, hidden, heads)
    dense = 3 * hidden * _need(config, "intermediate_size")
    experts = next((config[key] for key in _EXPERTS if config.get(key)), 0)
    if experts:
        width = config.get("moe_intermediate_size") or _need(config, "intermediate_size")
        one = 3 * hidden * width
        shared = one * (config.get("n_shared_experts") or 0)
        shared += 3 * hidden * (config.get("shared_expert_intermediate_size") or 0)
        num_dense = config.get("first_k_dense_replace") or 0
        num_moe = layers - num_dense
        active_mlp = num_dense * dense + num_moe * (one * _need(config, "num_experts_per_tok") + shared)
        all_mlp = num_dense * dense + num_moe * (one * experts + shared)
        notes.append("a pass reads the weights of all experts")
    else:
        active_mlp = all_mlp = layers * dense
    head = hidden * _need(config, "vocab_size")
    embeddings = 0 if config.get("tie_word_embeddings") else head
    active = layers * attention + active_mlp + head
    return ComputeShape(
        num_weights=layers * attention + all_mlp + head + embeddings,
        active_weights=active,
        flops_per_pair=layers * pair,
        assumptions=tuple(notes),
    )


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def _attention(config: Mapping[str, Any], hidden: int, heads: int) -> tuple[int, int]:
    """Weights of one layer's attention, and the FLOPs of one pair in it."""
    rank = config.get("kv_lora_rank")
    if rank:
        nope, rope, value = (_need(config, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        q_rank = config.get("q_lora_rank")
        query = heads * (nope + rope)
        weights = hidden * q_rank + q_rank * query if q_rank else hidden * query
        weights += hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
        return weights, 2 * heads * (nope + rope + value)
    dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return 2 * hidden * heads * dim + 2 * hidden * kv_heads * dim, 4 * heads * dim


def _need(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise ConfigUnusable(f"the config has no usable {name} (found {value!r}): FLOPs can't be derived")
    return value
