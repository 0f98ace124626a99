"""A memory mapping that remembers which file it shows, so that a view of it can be named to another process."""

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes `[offset, offset + num_bytes)` of a file."""

    path: Path
    offset: int
    num_bytes: int


class SharedMap(mmap.mmap):
    """An `mmap` of a file from its first byte on."""

    path: Path

    def __new__(cls, fd: int, num_bytes: int, path: Path, *, writable: bool = True, private: bool = False) -> Self:
        """`private`: writing is possible, and reaches nobody. Raises OSError."""
        shared = super().__new__(
            cls,
            fd,
            num_bytes,
            flags=mmap.MAP_PRIVATE if private else mmap.MAP_SHARED,
            prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable or private else 0),
        )
        shared.path = path
        return shared


def place_of(view: memoryview) -> Place | None:
    """Where a contiguous view lies; None where it isn't (part of) a `SharedMap`."""
    owner = view.obj
    if not isinstance(owner, SharedMap):
        return None
    offset = _address(view) - _address(memoryview(owner))
    return Place(owner.path, offset, view.nbytes)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
