"""Engines: tokens into KV, and KV into tokens. `contract` says what one does; the factory builds one by name."""
