"""What is remembered of a chunk."""

from typing import Generic

import msgspec

from halfmoon.eviction.contract import K

NOWHERE = -1


class KnownChunk(msgspec.Struct, Generic[K], eq=False, gc=False):
    """One per chunk, as long as it is in the pool and a while after: its history, and where it is among the leaves.

    The policy, the model and the leaves keep their parts in one place, so that a report looks its chunk up once. It
    refers to no other chunk, so the garbage collector has no cycles to look for in what may be a million of them.
    """

    key: K
    depth: int
    full: bool
    in_pool: bool = True
    num_children: int = 0
    """Chunks in the pool that come after this one."""
    uses: int = 0
    """Since it was first seen, without the first; counted as far as kinds tell them apart."""
    kind: int = 0
    used_ns: int = 0
    round: int = 0
    """The model's round at its last use."""
    cell: int = NOWHERE
    """Kind and age bucket, as one number, under which it is among the leaves."""
    grows_ns: int = 0
    """When it leaves that bucket; 0 where it never does, or isn't among the leaves."""
