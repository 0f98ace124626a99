"""What a pool tells an eviction policy, and what it asks it."""

from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

import msgspec

K = TypeVar("K", bound=Hashable)
"""A chunk's key: `ChunkKey` in a pool, a number in a trace."""


class ChunkFacts(msgspec.Struct, Generic[K], frozen=True):
    """What stays true of a chunk as long as it is in the pool."""

    parent: K | None
    """The chunk before it in every prompt that has it; None for a first chunk."""
    depth: int
    """How many chunks come before it."""
    full: bool = True
    """False for a prompt's last chunk where it holds fewer tokens than a chunk takes: a longer prompt can't use it."""


class Prompt(msgspec.Struct, frozen=True):
    """The prompt on whose behalf a chunk is stored or read."""

    number: int
    """Rises from prompt to prompt."""
    now_ns: int
    """Never falls."""
    num_chunks: int
    num_cached: int
    """How many of its chunks, from the first on, were in the pool when it came."""


class EvictionPolicy(Protocol[K]):
    """Keeps in mind what it is told of a pool's chunks, and names those that the pool should do without.

    1. The pool reports each prompt's chunks from the first to the last: `access` for those that it has, `insert` for
       those that it stores now.
    2. When it needs room it asks for `victims`, and reports each that it really lets go with `remove`. A policy
       evicts nothing itself.
    3. A chunk that is gone for another reason (flushed, corrupt) is reported with `remove(..., evicted=False)`.

    No clock and no randomness: the same reports give the same victims. Each report costs O(log chunks) at most.
    """

    @property
    def may_refuse(self) -> bool:
        """Whether the chunk that came last is a victim like any other, so that what is worth least never stays."""
        ...

    def insert(self, key: K, facts: ChunkFacts[K], prompt: Prompt) -> None:
        """A chunk is in the pool from now on. Raises ValueError where it is already."""
        ...

    def access(self, key: K, prompt: Prompt) -> None:
        """A chunk of the pool is used. Raises KeyError where it isn't in it."""
        ...

    def remove(self, key: K, *, evicted: bool = True) -> None:
        """A chunk has left the pool. Raises KeyError where it wasn't in it."""
        ...

    def victims(self, num_chunks: int, evictable: Callable[[K], bool]) -> list[K]:
        """The chunks to let go, the first one first. Fewer than asked for where no more are evictable."""
        ...

    def __len__(self) -> int:
        """How many chunks are in the pool."""
        ...
