"""The attention function that transformers' layers call, over our paged KV.

transformers looks up the function by name (`attn_implementation`) and hands it the queries, keys and values of the
tokens in this step, with rotary embedding applied, packed into one row. We store the keys and values, then attend per
sequence over everything that it has. What a step consists of travels as the keyword `paged_step`.
<https://huggingface.co/docs/transformers/main/en/attention_interface>
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from halfmoon.engine.torch.kv import LayerReader, PagedKV

NAME = "halfmoon_paged"


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's tokens within a step."""

    begin: int
    """First row in the packed step."""
    count: int
    context: LayerReader
    """Keys and values of all positions to attend to, this step's included."""
    mask: torch.Tensor | None
    """`[query rows][context]`, added to scores; None for a single token, which looks at everything."""


@dataclass(frozen=True, slots=True)
class PagedStep:
    kv: PagedKV
    slots: torch.Tensor
    """Where the new keys and values go, `[packed rows]`."""
    singles: Sequence[LayerReader]
    """Contexts of the first rows, which are a sequence each: those that decode."""
    segments: Sequence[Segment]
    """The rows after those."""


def causal_mask(count: int, context: int, groups: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """The mask for `count` queries at the end of `context` positions; each row is repeated for `groups` query heads.

    None where there is one query: it may look at everything.
    """
    if count == 1:
        return None
    rows = torch.arange(context - count, context, device=device)
    hidden = torch.arange(context, device=device)[None, :] > rows[:, None]
    mask = torch.zeros((count, context), dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    return mask.repeat(groups, 1)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    paged_step: PagedStep,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Shapes: query `[1][query head][rows][head dim]`, key and value the same with kv heads; returns
    `[1][rows][query head][head dim]`.

    Query heads that share a kv head are laid out as further rows of queries against it, so that keys and values are
    never repeated in memory.
    """
    layer = module.layer_idx
    assert isinstance(layer, int)
    step = paged_step
    step.kv.write(layer, step.slots, key[0], value[0])
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    groups = num_heads // num_kv_heads
    dim, value_dim = query.shape[3], value.shape[3]
    attended: list[torch.Tensor] = []
    """Each `[rows][query head][head dim]`, in the order of the rows."""
    if num_singles := len(step.singles):
        rows = query[0, :, :num_singles].transpose(0, 1).reshape(num_singles, 1, num_kv_heads, groups, dim)
        for row, context in zip(rows.unbind(0), step.singles, strict=True):
            keys, values = context(layer)
            found = scaled_dot_product_attention(row, keys, values, scale=scaling)
            attended.append(found.view(1, num_heads, value_dim))
    for segment in step.segments:
        keys, values = segment.context(layer)
        found = scaled_dot_product_attention(
            query[0, :, segment.begin : segment.begin + segment.count].reshape(
                1, num_kv_heads, groups * segment.count, dim
            ),
            keys,
            values,
            attn_mask=segment.mask,
            scale=scaling,
        )
        attended.append(found.reshape(num_heads, segment.count, value_dim).transpose(0, 1))
    return torch.cat(attended)[None], None


def no_mask(*_: Any, **__: Any) -> None:
    """transformers asks for a mask per step; ours is made per sequence."""


def register() -> None:
    """Make the function known to transformers under `NAME`. Idempotent."""
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, no_mask)
