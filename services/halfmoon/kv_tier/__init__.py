"""One host's KV pool: an arena of slots, leases on them, transfers from other nodes, eviction."""
