"""Whole blocks between vLLM's paged KV and files that are mapped. Runs in a rank's process, in one thread of its own.

A payload holds, for each rank in turn, `[layer][block][bytes of the block]`. What is inside a block is vLLM's affair:
its CPU kernels pack it by instruction set, so nothing else can read it, and the layout's name says so.
"""

import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from halfmoon.engine.vllm.messages import PlaceOf

_MAX_MAPPED = 8


class BlockCopier:
    """Copies blocks. Used by one thread at a time."""

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int, rank: int) -> None:
        """`kv_caches`: one tensor a layer, one of whose first two dimensions counts the blocks."""
        self._rows = [_by_block(cache, num_blocks, name) for name, cache in kv_caches.items()]
        self._row_bytes = [rows[0].numel() * rows.element_size() for rows in self._rows]
        self._rank = rank
        self._device = self._rows[0].device
        self._stream = _new_stream(self._device)
        self._maps: dict[str, torch.Tensor] = {}
        self.block_bytes = sum(self._row_bytes)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        return self._rows[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one block in one layer."""
        return tuple(self._rows[0].shape[1:])

    def load(self, place: PlaceOf, num_blocks: int, skip: int, block_ids: Sequence[int]) -> None:
        """Blocks `skip`, `skip + 1`, … of a payload of `num_blocks` into the blocks named. Raises OSError."""
        self._copy(place, num_blocks, skip, block_ids, is_load=True)

    def save(self, place: PlaceOf, num_blocks: int, block_ids: Sequence[int], after: "torch.cuda.Event | None") -> None:
        """The blocks named into a payload, once `after` has come to pass. Raises OSError."""
        if after is not None and self._stream is not None:
            self._stream.wait_event(after)
        self._copy(place, num_blocks, 0, block_ids, is_load=False)

    def _copy(self, place: PlaceOf, num_blocks: int, skip: int, block_ids: Sequence[int], *, is_load: bool) -> None:
        payload = self._map(place.path)[place.offset : place.offset + place.num_bytes]
        start = self._rank * num_blocks * self.block_bytes
        if start + num_blocks * self.block_bytes > place.num_bytes:
            raise OSError(f"a payload of {place.num_bytes} bytes for {num_blocks} blocks of {self.block_bytes}")
        if self._stream is None:
            self._copy_layers(payload, start, num_blocks, skip, block_ids, is_load=is_load)
            return
        with torch.cuda.stream(self._stream):
            self._copy_layers(payload, start, num_blocks, skip, block_ids, is_load=is_load)
        self._stream.synchronize()

    def _copy_layers(
        self, payload: torch.Tensor, start: int, num_blocks: int, skip: int, block_ids: Sequence[int], *, is_load: bool
    ) -> None:
        for rows, row_bytes in zip(self._rows, self._row_bytes, strict=True):
            first = start + skip * row_bytes
            count = len(block_ids)
            flat = payload[first : first + count * row_bytes].view(rows.dtype).view(count, *rows.shape[1:])
            start += num_blocks * row_bytes
            if self._stream is not None:
                _copy_gathered(rows, flat, block_ids, is_load=is_load)
            elif is_load:
                for block_id, source in zip(block_ids, flat, strict=True):
                    rows[block_id].copy_(source)
            else:
                for block_id, destination in zip(block_ids, flat, strict=True):
                    destination.copy_(rows[block_id])

    def _map(self, path: str) -> torch.Tensor:
        """The file's bytes; pinned for a GPU, so that it copies by itself."""
        mapped = self._maps.get(path)
        if mapped is None:
            for gone in [each for each in self._maps if not Path(each).exists()]:
                self._unmap(gone)
            while len(self._maps) >= _MAX_MAPPED:
                self._unmap(next(iter(self._maps)))
            mapped = self._maps[path] = _mapped(path)
            if self._stream is not None:
                _cuda_runtime().cudaHostRegister(mapped.data_ptr(), mapped.numel(), 0)
        return mapped

    def _unmap(self, path: str) -> None:
        mapped = self._maps.pop(path)
        if self._stream is not None:
            _cuda_runtime().cudaHostUnregister(mapped.data_ptr())


def _new_stream(device: torch.device) -> "torch.cuda.Stream | None":
    """Copies run beside the model on a GPU. None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _by_block(cache: torch.Tensor, num_blocks: int, name: str) -> torch.Tensor:
    """A view whose first dimension counts the blocks; some of vLLM's attention backends put keys and values first."""
    for dim in range(2):
        if cache.shape[dim] == num_blocks:
            return cache.movedim(dim, 0)
    raise ValueError(f"the KV cache of {name} has the shape {tuple(cache.shape)}, none of it {num_blocks} blocks")


def _copy_gathered(rows: torch.Tensor, flat: torch.Tensor, block_ids: Sequence[int], *, is_load: bool) -> None:
    """One copy a layer over the bus, and a gather or scatter on the GPU."""
    index = torch.tensor(block_ids, device=rows.device)
    if is_load:
        rows.index_copy_(0, index, flat.to(rows.device, non_blocking=True))
    else:
        flat.copy_(rows.index_select(0, index), non_blocking=True)


def _mapped(path: str) -> torch.Tensor:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        return torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)
    finally:
        os.close(fd)
