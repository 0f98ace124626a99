"""The size of a model's KV as a report: per token, per context, per rank, and how much of it an arena holds. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from halfmoon.models import dtype_bytes, kv_shape
from halfmoon.models.kv_size import DTYPE_BYTES

DTYPES = (*DTYPE_BYTES, "float8")
_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp8": "float8"}
_DEFAULT_DTYPE = "float16"
_PAGE_BYTES = 4096


class ContextSize(msgspec.Struct, frozen=True, kw_only=True):
    num_tokens: int
    num_bytes: int
    rank_bytes: int
    """On each of the ranks."""


class Layers(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    num_layers: int
    bytes_per_token: int
    window_tokens: int | None


class ArenaFit(msgspec.Struct, frozen=True, kw_only=True):
    arena_bytes: int
    chunk_tokens: int
    slot_bytes: int
    """A chunk's, up to whole pages."""
    num_chunks: int
    num_tokens: int


class KvAdvice(msgspec.Struct, frozen=True, kw_only=True):
    model_type: str
    attention: str
    dtype: str
    bytes_per_token: int
    tensor_parallel: int
    rank_bytes_per_token: int
    layers: tuple[Layers, ...]
    contexts: tuple[ContextSize, ...]
    arena: ArenaFit | None
    assumptions: tuple[str, ...]


def advise_kv(
    config: Mapping[str, Any],
    *,
    dtype: str,
    contexts: Sequence[int],
    tensor_parallel: int,
    arena_bytes: int | None,
    chunk_tokens: int,
) -> KvAdvice:
    """`dtype` `auto`: as the config has it. Raises ValueError where the dtype or the KV's shape isn't known."""
    shape = kv_shape(config)
    assumptions = list(shape.assumptions)
    name = _ALIASES.get(dtype, dtype)
    if name == "auto":
        name, why = _dtype_of(config)
        assumptions += [why] if why else []
    element_bytes = 1 if name == "float8" else dtype_bytes(name)
    per_token = shape.bytes_per_token(element_bytes)
    if tensor_parallel > 1 and shape.is_latent:
        assumptions.append("each rank holds the latent entries whole: attention's heads are split, its cache isn't")
    return KvAdvice(
        model_type=str(config.get("model_type", "unknown")),
        attention=shape.attention,
        dtype=name,
        bytes_per_token=per_token,
        tensor_parallel=tensor_parallel,
        rank_bytes_per_token=shape.bytes_per_token(element_bytes, tensor_parallel),
        layers=tuple(
            Layers(
                kind=group.kind.value,
                num_layers=group.num_layers,
                bytes_per_token=element_bytes * group.elements_per_token(),
                window_tokens=group.window_tokens,
            )
            for group in shape.groups
        ),
        contexts=tuple(
            ContextSize(
                num_tokens=num_tokens,
                num_bytes=shape.bytes_at(num_tokens, element_bytes),
                rank_bytes=shape.bytes_at(num_tokens, element_bytes, tensor_parallel),
            )
            for num_tokens in contexts
        ),
        arena=None if arena_bytes is None else _fit(arena_bytes, chunk_tokens, per_token),
        assumptions=tuple(assumptions),
    )


def _fit(arena_bytes: int, chunk_tokens: int, bytes_per_token: int) -> ArenaFit:
    """Slots hold the KV of all layers and ranks, and every token of it, whatever the layers' windows."""
    slot_bytes = -(-chunk_tokens * bytes_per_token // _PAGE_BYTES) * _PAGE_BYTES
    num_chunks = arena_bytes // slot_bytes
    return ArenaFit(
        arena_bytes=arena_bytes,
        chunk_tokens=chunk_tokens,
        slot_bytes=slot_bytes,
        num_chunks=num_chunks,
        num_tokens=num_chunks * chunk_tokens,
    )


def _dtype_of(config: Mapping[str, Any]) -> tuple[str, str | None]:
    """The weights' type, which engines use for KV unless told otherwise; and what was assumed."""
    named = next((config[name] for name in ("dtype", "torch_dtype") if config.get(name)), None)
    if named in DTYPE_BYTES:
        return str(named), None
    found = "names no element type" if named is None else f"has weights of {named}"
    return _DEFAULT_DTYPE, f"the config {found}: {_DEFAULT_DTYPE} is assumed for the KV"
