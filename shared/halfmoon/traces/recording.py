"""Recordings of a system's requests: JSON lines, of which no prompt can be read out again.

The first line is the header; models and requests follow; `end` comes last where the recording ended in order. A
request's `blocks` are hashes of 64 tokens each and all before them, keyed by a random key that is drawn per recording
and never written: equal blocks can be seen to be equal, and guesses can't be tried. 53 bits, so that every JSON reader
keeps them whole; among a million different blocks, two collide with a probability of 0.006 %.
"""

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

FORMAT = "halfmoon-requests"
VERSION = 1
BLOCK_TOKENS = 64
_HASH_BITS = 53
_DIGEST_BYTES = 16


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """Base of the lines. Later versions may add fields, which older readers skip."""


class Header(Line, frozen=True, tag="header"):
    format: str
    version: int
    block_tokens: int
    started: str
    """UTC, ISO 8601."""


class ModelLine(Line, frozen=True, tag="model"):
    """What workers said of a model. The last line for a model is the one that holds."""

    name: str
    kv_bytes_per_token: int
    chunk_tokens: int
    prefill_tokens_per_s: float | None = None
    prefill_fit: tuple[float, float, float] | None = None
    """Seconds of a prompt: as it stands, and for each new token and each pair of tokens. None: not measured."""
    step_fit: tuple[float, float, float] | None = None
    """Seconds of a step: as it stands, and for each sequence and each token of context."""
    request_s: float | None = None
    """What services add to a first token, from a request's placing on, where nothing waits. None: not measured."""
    kv_tokens: int | None = None
    """KV that one engine which decodes has room for."""


class RequestLine(Line, frozen=True, tag="request"):
    """One request, however often it was placed. Written when it has ended, so lines aren't sorted by `at_ms`."""

    at_ms: int
    """When it arrived at a conductor, since the recording's begin. What was refused isn't recorded."""
    model: str
    tenant: str
    """Hashed with the recording's key."""
    prompt_tokens: int
    completion_tokens: int | None = None
    """None: it hadn't ended when the recording did."""
    blocks: tuple[int, ...] = ()
    """Of the prompt's whole blocks."""
    service_class: str | None = None
    """Absent where the request named none: `interactive`."""


class EndLine(Line, frozen=True, tag="end"):
    at_ms: int
    num_requests: int
    num_missed_messages: int
    """Came faster than they could be written, or couldn't be read."""
    num_disconnects: int


AnyLine = Header | ModelLine | RequestLine | EndLine


class BlockHasher:
    """Hashes of one recording."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def blocks(self, root: bytes, tokens: Sequence[int]) -> tuple[int, ...]:
        """Of the whole blocks of a prompt. `root`: that of its chunk keys, so that what can't share KV differs.

        Raises ValueError where a token id doesn't fit in 32 bits.
        """
        num_blocks = len(tokens) // BLOCK_TOKENS
        try:
            packed = np.asarray(tokens[: num_blocks * BLOCK_TOKENS], dtype="<u4").tobytes()
        except OverflowError as error:
            raise ValueError("token ids must be between 0 and 2**32 - 1") from error
        width = 4 * BLOCK_TOKENS
        hashes = []
        parent = root
        for begin in range(0, num_blocks * width, width):
            parent = self._digest(parent + packed[begin : begin + width])
            hashes.append(int.from_bytes(parent[:8], "big") >> (64 - _HASH_BITS))
        return tuple(hashes)

    def name(self, name: str) -> str:
        return self._digest(b"name\0" + name.encode())[:8].hex()

    def _digest(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, key=self._key, digest_size=_DIGEST_BYTES).digest()
