"""The KV pool as its users see it: a mapped arena, and a client for the node's kv-tier."""

from halfmoon.pool.arena import Arena, ArenaError
from halfmoon.pool.client import PoolClient

__all__ = ["Arena", "ArenaError", "PoolClient"]
