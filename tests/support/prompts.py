"""Prompts of exact lengths."""

import random


def random_tokens(count: int, seed: int) -> list[int]:
    """`count` ordinary token ids; the same for the same seed, and with other seeds no common prefix to speak of."""
    generator = random.Random(seed)
    return [generator.randrange(1000, 40_000) for _ in range(count)]


def lengths(chunk_tokens: int) -> list[int]:
    """The lengths at which chunking can go wrong."""
    return [1, chunk_tokens - 1, chunk_tokens, chunk_tokens + 1, 2 * chunk_tokens, 3 * chunk_tokens + 7]
