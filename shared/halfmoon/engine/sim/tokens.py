"""What the simulated engine computes instead of a model: KV and tokens that are functions of the prompt.

The KV of a token is a hash of all tokens up to it, as a real one depends on its whole prefix. The first hash of a
completion covers every byte of the prompt's KV, so an engine that was given wrong KV says something else.
"""

import hashlib
from collections.abc import Iterator, Sequence

KV_BYTES_PER_TOKEN = 64
_START = bytes(KV_BYTES_PER_TOKEN)
_NUM_WORDS = 512


def prompt_kv(tokens: Sequence[int], start: int = 0, before: bytes = _START) -> Iterator[bytes]:
    """The KV of each of `tokens[start:]`; `before` is the KV of the token in front of them."""
    for token in tokens[start:]:
        before = hashlib.blake2b(token.to_bytes(8, "little"), key=before).digest()
        yield before


def completion_seed(kv: bytes | bytearray | memoryview) -> bytes:
    """What a completion is drawn from: all of the prompt's KV."""
    return hashlib.blake2b(kv).digest()


def completion_token(seed: bytes, position: int, vocab_size: int) -> int:
    """The token at a position of the completion: an ordinary word, in vocabularies that keep theirs in the middle."""
    number = int.from_bytes(hashlib.blake2b(position.to_bytes(8, "little"), key=seed, digest_size=8).digest(), "little")
    first = min(1000, vocab_size // 2)
    return first + number % min(_NUM_WORDS, vocab_size - first)
