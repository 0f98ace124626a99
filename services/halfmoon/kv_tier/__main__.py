"""`python -m halfmoon.kv_tier`: the KV pool of one node."""

import sys

from halfmoon import lifecycle
from halfmoon.kv_tier.config import KvTierConfig
from halfmoon.kv_tier.service import KvTier
from halfmoon.transport.slices import share_interpreter

if __name__ == "__main__":
    share_interpreter()
    sys.exit(lifecycle.run("kv_tier", KvTierConfig, KvTier))
