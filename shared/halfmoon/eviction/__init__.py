"""Which chunks a pool should do without: one contract, and the policies that meet it. Pure."""

from halfmoon.eviction.contract import ChunkFacts, EvictionPolicy, Prompt
from halfmoon.eviction.factory import PolicyName, make_policy

__all__ = ["ChunkFacts", "EvictionPolicy", "PolicyName", "Prompt", "make_policy"]
