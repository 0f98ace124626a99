"""Eviction policies by name."""

from enum import StrEnum

from halfmoon.eviction.arc import Arc
from halfmoon.eviction.contract import EvictionPolicy, K
from halfmoon.eviction.lru import Lru
from halfmoon.eviction.prefix_aware import PrefixAware
from halfmoon.eviction.ranked import LengthAware, Lfu
from halfmoon.eviction.s3_fifo import S3Fifo


class PolicyName(StrEnum):
    PREFIX_AWARE = "prefix_aware"
    """The default."""
    LRU = "lru"
    LFU = "lfu"
    LENGTH_AWARE = "length_aware"
    ARC = "arc"
    S3_FIFO = "s3_fifo"


def make_policy(name: PolicyName, capacity: int, _key: type[K]) -> EvictionPolicy[K]:
    """A fresh policy for a pool of `capacity` chunks with keys of this type. Raises ValueError for capacity < 1."""
    if capacity < 1:
        raise ValueError(f"a pool of {capacity} chunks can't evict: expected at least 1")
    match name:
        case PolicyName.PREFIX_AWARE:
            return PrefixAware(capacity)
        case PolicyName.LRU:
            return Lru()
        case PolicyName.LFU:
            return Lfu()
        case PolicyName.LENGTH_AWARE:
            return LengthAware()
        case PolicyName.ARC:
            return Arc(capacity)
        case PolicyName.S3_FIFO:
            return S3Fifo(capacity)
