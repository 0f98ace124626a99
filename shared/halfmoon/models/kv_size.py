"""How large a model's KV is: shapes of its layers, and what follows from them. Pure.

    layer             elements of one token, per layer
    multi-head        2 · heads · head dim
    grouped-query     2 · KV heads · head dim          (multi-query: one KV head)
    latent (MLA)      kv_lora_rank + qk_rope_head_dim  (DeepSeek-V2, arXiv:2405.04434, section 2.1)
    recurrent         none: a state per sequence, whatever its length

`halfmoon.models.kv_layers` reads the shape from a config.
"""

from dataclasses import dataclass
from enum import StrEnum

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Element types that the engines' KV can have."""


def dtype_bytes(dtype: str) -> int:
    """Size of one element. Raises ValueError for a dtype that KV can't have."""
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r} is unknown; use {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


class LayerKind(StrEnum):
    FULL = "full attention"
    SLIDING = "sliding window"
    LATENT = "latent attention"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers whose KV has the same shape."""

    kind: LayerKind
    num_layers: int
    num_kv_heads: int
    """0 for recurrent layers; 1 for latent ones, which all heads share."""
    key_dim: int
    """Elements of a head's key; of the whole latent entry, for latent layers."""
    value_dim: int
    """0 for latent layers: values are computed from the same entry."""
    window_tokens: int | None = None
    """A token further back than this is never read again. None: all are."""

    def elements_per_token(self, tensor_parallel: int = 1) -> int:
        """Of all layers of the group, on one of `tensor_parallel` ranks: KV heads are dealt out, and a head is the
        least that a rank holds, so that fewer heads than ranks are held several times."""
        heads = -(-self.num_kv_heads // tensor_parallel)
        return self.num_layers * heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    groups: tuple[LayerGroup, ...]
    num_heads: int
    """Query heads, for the name of the attention."""
    assumptions: tuple[str, ...] = ()
    """What the config doesn't say, and was taken for granted."""

    def bytes_per_token(self, element_bytes: int, tensor_parallel: int = 1) -> int:
        """What one more token adds, over all layers, while it is within every window. On one rank."""
        return element_bytes * sum(group.elements_per_token(tensor_parallel) for group in self.groups)

    def bytes_at(self, num_tokens: int, element_bytes: int, tensor_parallel: int = 1) -> int:
        """Of a sequence of `num_tokens`, where layers with a window keep no more than it. On one rank."""
        return element_bytes * sum(
            group.elements_per_token(tensor_parallel) * min(num_tokens, group.window_tokens or num_tokens)
            for group in self.groups
        )

    @property
    def has_windows(self) -> bool:
        return any(group.window_tokens is not None for group in self.groups)

    @property
    def is_latent(self) -> bool:
        return any(group.kind is LayerKind.LATENT for group in self.groups)

    @property
    def attention(self) -> str:
        """`multi-head`, `grouped-query`, `multi-query` or `latent (MLA)`, as the layers have it that keep KV."""
        if self.is_latent:
            return "latent (MLA)"
        heads = {group.num_kv_heads for group in self.groups if group.kind is not LayerKind.RECURRENT}
        if heads == {self.num_heads}:
            return "multi-head"
        return "multi-query" if heads == {1} else "grouped-query"
