"""The shape of a model's KV, read from its config: which layers keep how much for each token.

Names are those of Hugging Face configs, older spellings included. A layer type that isn't known is refused: a number
that may be wrong is of no use to somebody who buys memory by it.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from halfmoon.models.kv_size import KvShape, LayerGroup, LayerKind

_KINDS = {
    "full_attention": LayerKind.FULL,
    "attention": LayerKind.FULL,
    "global_attention": LayerKind.FULL,
    "hybrid": LayerKind.FULL,
    "sliding_attention": LayerKind.SLIDING,
    "local_attention": LayerKind.SLIDING,
    "chunked_attention": LayerKind.SLIDING,
    "linear_attention": LayerKind.RECURRENT,
    "recurrent": LayerKind.RECURRENT,
    "mamba": LayerKind.RECURRENT,
    "mamba2": LayerKind.RECURRENT,
    "conv": LayerKind.RECURRENT,
    "moe": LayerKind.RECURRENT,
    "mlp": LayerKind.RECURRENT,
}
"""Layers without attention count as recurrent: they keep nothing for a token."""

_WINDOW_PERIODS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gemma4": 6, "gemma4_text": 6, "cohere2": 4}
_WINDOW_PERIODS |= {"gpt_oss": 2, "gpt-oss": 2}
"""Where the config names no layers, each such model's last of so many layers is a full one."""

_RECURRENT_KEYS = ("ssm_cfg", "state_size", "ssm_state_size", "lru_width", "mamba_d_state", "linear_num_key_heads")
_PARALLEL_TYPES = frozenset({"falcon_h1", "hymba"})
"""Each layer has attention and recurrence side by side."""

_TEXT_PARTS = ("text_config", "llm_config", "language_config")


class ConfigUnusable(ValueError):
    """The size of this model's KV can't be told from its config; the message says why."""


def kv_shape(config: Mapping[str, Any]) -> KvShape:
    """Raises `ConfigUnusable`."""
    assumptions: list[str] = []
    part = next((name for name in _TEXT_PARTS if isinstance(config.get(name), Mapping)), None)
    if part is not None and _count(config, "num_hidden_layers", "n_layer", "num_layers") is None:
        config = config[part]
        assumptions.append("only the language model's KV counts; images become tokens of it")
    kind = config.get("model_type", "unknown")
    if config.get("is_encoder_decoder"):
        raise ConfigUnusable(f"{kind} is an encoder-decoder model: its KV depends on two lengths")
    if config.get("compress_ratios") or config.get("compress_rates"):
        raise ConfigUnusable(f"{kind} compresses the KV of several tokens into one entry: no size per token is known")
    num_layers = _need(config, "num_hidden_layers", "n_layer", "num_layers")
    num_heads = _need(config, "num_attention_heads", "n_head", "num_heads")
    kinds = _layer_kinds(config, num_layers, assumptions)
    window = _window(config, assumptions) if LayerKind.SLIDING in kinds else None
    shared = config.get("num_kv_shared_layers") or 0
    if shared:
        kinds = kinds[: num_layers - shared]
        assumptions.append(f"the last {shared} layers use the KV of earlier ones")
    shapes = [_layer(config, index, kind, num_heads, window) for index, kind in enumerate(kinds)]
    if all(shape.kind is LayerKind.RECURRENT for shape in shapes):
        raise ConfigUnusable(f"{kind} keeps no KV: none of its layers has attention")
    if LayerKind.RECURRENT in kinds:
        assumptions.append(
            f"{kinds.count(LayerKind.RECURRENT)} layers keep nothing per token; what state a sequence has isn't counted"
        )
    if config.get("kv_lora_rank") and config.get("index_head_dim"):
        assumptions.append("the keys of the sparse attention's indexer are counted as elements of the KV's type")
    return KvShape(groups=_grouped(shapes), num_heads=num_heads, assumptions=tuple(assumptions))


def _layer(config: Mapping[str, Any], index: int, kind: LayerKind, num_heads: int, window: int | None) -> LayerGroup:
    if kind is LayerKind.RECURRENT:
        return LayerGroup(kind=kind, num_layers=1, num_kv_heads=0, key_dim=0, value_dim=0)
    rank = config.get("kv_lora_rank")
    if rank:
        entry = rank + _need(config, "qk_rope_head_dim") + (config.get("index_head_dim") or 0)
        return LayerGroup(kind=LayerKind.LATENT, num_layers=1, num_kv_heads=1, key_dim=entry, value_dim=0)
    heads, dim = _kv_heads(config, index, num_heads), _head_dim(config, num_heads)
    if kind is LayerKind.FULL:
        dim = config.get("global_head_dim") or dim
        heads = config.get("num_global_key_value_heads") or heads
    own = (config.get("per_layer_config") or {}).get(str(index)) or {}
    dim, heads = own.get("head_dim", dim), own.get("num_key_value_heads", heads)
    if heads == 0:
        return LayerGroup(kind=LayerKind.RECURRENT, num_layers=1, num_kv_heads=0, key_dim=0, value_dim=0)
    return LayerGroup(
        kind=kind,
        num_layers=1,
        num_kv_heads=heads,
        key_dim=dim,
        value_dim=config.get("v_head_dim") or dim,
        window_tokens=window if kind is LayerKind.SLIDING else None,
    )


def _kv_heads(config: Mapping[str, Any], layer: int, num_heads: int) -> int:
    given = config.get("num_key_value_heads", config.get("num_kv_heads"))
    if isinstance(given, Sequence) and len(given) > layer and type(given[layer]) is int:
        return int(given[layer])
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    if config.get("multi_query_attention"):
        return _need(config, "multi_query_group_num")
    if given is None:
        return num_heads
    return _need(config, "num_key_value_heads", "num_kv_heads")


def _head_dim(config: Mapping[str, Any], num_heads: int) -> int:
    given = _count(config, "head_dim", "kv_channels")
    return given if given is not None else _need(config, "hidden_size", "n_embd", "d_model") // num_heads


def _layer_kinds(config: Mapping[str, Any], num_layers: int, assumptions: list[str]) -> list[LayerKind]:
    """What each layer is, in order."""
    names = config.get("layer_types") or config.get("layers_block_type")
    if names:
        return _named(names, num_layers)
    model_type = config.get("model_type", "unknown")
    if pattern := config.get("hybrid_override_pattern"):
        return _named(["attention" if letter == "*" else "mamba" for letter in pattern], num_layers)
    if cycle := config.get("block_types"):
        kinds = _named([cycle[index % len(cycle)] for index in range(num_layers)], num_layers)
        windowed = bool(config.get("attention_window_size"))
        return [LayerKind.SLIDING if windowed and kind is LayerKind.FULL else kind for kind in kinds]
    full = _full_among_recurrent(config, num_layers)
    if full is not None:
        return [LayerKind.FULL if index in full else LayerKind.RECURRENT for index in range(num_layers)]
    if model_type not in _PARALLEL_TYPES and (key := next((k for k in _RECURRENT_KEYS if config.get(k)), None)):
        raise ConfigUnusable(f"{model_type} has recurrent layers ({key}), and its config doesn't say which")
    return _windowed(config, model_type, num_layers, assumptions)


def _named(names: Sequence[object], num_layers: int) -> list[LayerKind]:
    if len(names) != num_layers:
        raise ConfigUnusable(f"the config names {len(names)} layers, and says that there are {num_layers}")
    if unknown := sorted({str(name) for name in names} - _KINDS.keys()):
        raise ConfigUnusable(f"layers of type {', '.join(unknown)} aren't known; known are {', '.join(_KINDS)}")
    return [_KINDS[str(name)] for name in names]


def _full_among_recurrent(config: Mapping[str, Any], num_layers: int) -> set[int] | None:
    """Indices of the layers with attention, where the config tells them apart by number."""
    if indices := config.get("attn_layer_indices"):
        return set(indices)
    if period := config.get("attn_layer_period"):
        return set(range(config.get("attn_layer_offset") or 0, num_layers, period))
    if interval := config.get("full_attention_interval"):
        return set(range(interval - 1, num_layers, interval))
    if flags := config.get("attn_type_list"):
        return {index for index, flag in enumerate(flags) if flag}
    if linear := config.get("linear_attn_config"):
        return {number - 1 for number in linear.get("full_attn_layers", ())}
    return None


def _windowed(config: Mapping[str, Any], model_type: str, num_layers: int, assumptions: list[str]) -> list[LayerKind]:
    """Full layers and those with a window, where the config names no layers."""
    if not config.get("sliding_window") or not config.get("use_sliding_window", True):
        return [LayerKind.FULL] * num_layers
    first = config.get("max_window_layers")
    if isinstance(first, int):
        return [LayerKind.SLIDING if index >= first else LayerKind.FULL for index in range(num_layers)]
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, str):
        return [LayerKind.FULL if pattern[i % len(pattern)] == "G" else LayerKind.SLIDING for i in range(num_layers)]
    period = pattern if isinstance(pattern, int) and pattern > 0 else _WINDOW_PERIODS.get(model_type)
    if period is None:
        assumptions.append("the config has a window and names no layers: all are taken to slide")
        return [LayerKind.SLIDING] * num_layers
    if pattern is None:
        assumptions.append(f"every {period}th layer is a full one, as {model_type} has it; its config doesn't say")
    return [LayerKind.FULL if (index + 1) % period == 0 else LayerKind.SLIDING for index in range(num_layers)]


def _window(config: Mapping[str, Any], assumptions: list[str]) -> int:
    window = _need(config, "sliding_window", "attention_chunk_size", "attention_window_size")
    assumptions.append(
        f"at a context's size, layers with a window keep its {window:,} tokens; an engine that doesn't free what has "
        "left the window, and the pool, keep all of them: tokens × bytes a token"
    )
    return window


def _grouped(layers: list[LayerGroup]) -> tuple[LayerGroup, ...]:
    def shape(layer: LayerGroup) -> tuple[str, int, int, int, int]:
        return layer.kind.value, layer.num_kv_heads, layer.key_dim, layer.value_dim, layer.window_tokens or 0

    groups = [list(group) for _, group in groupby(sorted(layers, key=shape), key=shape)]
    return tuple(
        LayerGroup(
            kind=group[0].kind,
            num_layers=len(group),
            num_kv_heads=group[0].num_kv_heads,
            key_dim=group[0].key_dim,
            value_dim=group[0].value_dim,
            window_tokens=group[0].window_tokens,
        )
        for group in groups
    )


def _count(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of the names that the config has. Raises `ConfigUnusable` where it is no positive number."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if type(value) is not int or value < 1:
                raise ConfigUnusable(f"{name} is {value!r} in the config, where a positive number is expected")
            return value
    return None


def _need(config: Mapping[str, Any], *names: str) -> int:
    value = _count(config, *names)
    if value is None:
        raise ConfigUnusable(f"the config has no {names[0]}: it describes no decoder-only language model")
    return value
