"""The paged KV of the torch engine.

One tensor `[layer][k, v][kv head][token slot][head dim]`, handed out in blocks of a few token slots. A sequence gets
consecutive blocks where there is such a run, and attention then reads its keys as a view; else scattered ones, which
are gathered. Payloads of chunks are `[layer][k, v][token][kv head][head dim]`: the two middle axes change places.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from halfmoon.engine.contract import EngineFull

KeysValues = tuple[torch.Tensor, torch.Tensor]
"""Of one sequence in one layer, each `[1][kv head][token][head dim]`."""

LayerReader = Callable[[int], KeysValues]
"""From a layer's number to what it has stored."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The token slots of one sequence: position i of the sequence lives in the i-th."""

    blocks: tuple[int, ...]
    block_tokens: int
    first: int | None
    """Slot of position 0 where the blocks are consecutive; None where they are scattered."""
    slots: torch.Tensor
    """`[capacity]`, int64, on the engine's device."""

    @property
    def num_tokens(self) -> int:
        return len(self.blocks) * self.block_tokens


class BlockAllocator:
    """Hands out block numbers `0 … num_blocks-1`, as one run where possible. All or nothing."""

    def __init__(self, num_blocks: int) -> None:
        self._free = [True] * num_blocks
        self.num_free = num_blocks

    def take(self, count: int) -> tuple[int, ...] | None:
        """`count` blocks, in order; None (and nothing taken) where fewer are free."""
        if count > self.num_free:
            return None
        run = self._find_run(count)
        blocks = range(run, run + count) if run is not None else self._scattered(count)
        taken = tuple(blocks)
        for block in taken:
            self._free[block] = False
        self.num_free -= count
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self._free[block]:
                raise AssertionError(f"block {block} was freed twice")
            self._free[block] = True
        self.num_free += len(blocks)

    def _find_run(self, count: int) -> int | None:
        length = 0
        for block, free in enumerate(self._free):
            length = length + 1 if free else 0
            if length == count:
                return block - count + 1
        return None

    def _scattered(self, count: int) -> list[int]:
        free = [block for block, is_free in enumerate(self._free) if is_free]
        return free[:count]


class PagedKV:
    """Keys and values of all open sequences."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_tokens: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        num_blocks = max(1, num_tokens // block_tokens)
        self._block_tokens = block_tokens
        self._allocator = BlockAllocator(num_blocks)
        self._device = device
        self.dtype = dtype
        self.total_tokens = num_blocks * block_tokens
        self._kv = torch.empty((num_layers, 2, num_kv_heads, self.total_tokens, head_dim), dtype=dtype, device=device)
        self._layers = [(layer[0], layer[1]) for layer in self._kv]
        self.bytes_per_token = num_layers * 2 * num_kv_heads * head_dim * self._kv.element_size()

    @property
    def free_tokens(self) -> int:
        return self._allocator.num_free * self._block_tokens

    def take(self, num_tokens: int) -> Extent:
        """Slots for `num_tokens` positions. Raises `EngineFull`, or ValueError where they could never be had."""
        count = -(-num_tokens // self._block_tokens)
        if count * self._block_tokens > self.total_tokens:
            raise ValueError(f"a sequence of {num_tokens} tokens can't fit in a KV of {self.total_tokens}")
        blocks = self._allocator.take(count)
        if blocks is None:
            raise EngineFull(num_tokens, self.free_tokens)
        is_run = blocks[-1] - blocks[0] == count - 1
        within = torch.arange(self._block_tokens)
        slots = (torch.tensor(blocks)[:, None] * self._block_tokens + within).flatten()
        first = blocks[0] * self._block_tokens if is_run else None
        return Extent(blocks, self._block_tokens, first, slots.to(self._device))

    def give_back(self, extent: Extent) -> None:
        self._allocator.give_back(extent.blocks)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new keys and values, each `[kv head][token][head dim]`, at `slots` `[token]`."""
        k, v = self._layers[layer]
        k.index_copy_(1, slots, keys)
        v.index_copy_(1, slots, values)

    def reader(self, extent: Extent, num_tokens: int) -> LayerReader:
        """Keys and values of the first positions, by layer: views where possible, else gathered when asked for."""
        if extent.first is not None:
            run = self._kv.narrow(3, extent.first, num_tokens)
            # All layers at once: with a batch of 16, calls per layer and sequence would cost as much as attending.
            views = list(zip(run[:, 0, None].unbind(0), run[:, 1, None].unbind(0), strict=True))
            return views.__getitem__
        slots = extent.slots[:num_tokens]

        def gather(layer: int) -> KeysValues:
            keys, values = self._layers[layer]
            return keys.index_select(1, slots)[None], values.index_select(1, slots)[None]

        return gather

    def load(self, extent: Extent, start: int, num_tokens: int, payload: memoryview) -> None:
        """Copy a chunk's payload to positions `[start, start + num_tokens)`."""
        chunk = self._as_tensor(payload, num_tokens).permute(0, 1, 3, 2, 4)
        if extent.first is not None:
            self._kv.narrow(3, extent.first + start, num_tokens).copy_(chunk)
        else:
            self._kv[:, :, :, extent.slots[start : start + num_tokens]] = chunk.to(self._device)

    def export(self, extent: Extent, start: int, num_tokens: int, payload: memoryview) -> None:
        """Copy positions `[start, start + num_tokens)` into a chunk's payload."""
        if extent.first is not None:
            found = self._kv.narrow(3, extent.first + start, num_tokens)
        else:
            found = self._kv.index_select(3, extent.slots[start : start + num_tokens])
        self._as_tensor(payload, num_tokens).copy_(found.permute(0, 1, 3, 2, 4))

    def _as_tensor(self, payload: memoryview, num_tokens: int) -> torch.Tensor:
        """The payload as `[layer][k, v][token][kv head][head dim]`, on the CPU, sharing its memory."""
        expected = num_tokens * self.bytes_per_token
        if payload.nbytes != expected:
            raise ValueError(f"a payload of {num_tokens} tokens has {expected} bytes, this one {payload.nbytes}")
        buffer = bytearray(payload) if payload.readonly else payload
        layers, two, heads, _, dim = self._kv.shape
        return torch.frombuffer(buffer, dtype=self._kv.dtype).view(layers, two, num_tokens, heads, dim)
