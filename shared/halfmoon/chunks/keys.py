"""Content-addressed chunk keys: equal keys mean equal KV, across processes, machines and languages.

    root     = sha256(canonical namespace)
    key[0]   = sha256(root   ‖ tokens[0:c]   as little-endian u32)
    key[i]   = sha256(key[i-1] ‖ tokens[ic:(i+1)c] as little-endian u32)

A key depends on every token before it, so prompts that differ early never match later; and on the namespace, so models,
adapters, KV dtypes, layouts and tenants never share. sha256 rather than a faster hash: a tenant must not be able to
construct another's key.
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence

import msgspec

from halfmoon.schemas.ids import ChunkKey, TransferId
from halfmoon.schemas.model import ModelCard

FORMAT_VERSION = 1
KEY_BYTES = 32


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """All that must be equal for KV to be shared, besides the tokens."""

    fingerprint: str
    """Of weights and config; the model's name doesn't count."""
    kv_dtype: str
    layout: str
    adapter: str = ""
    tenant_salt: str = ""
    version: int = FORMAT_VERSION

    @classmethod
    def of(cls, card: ModelCard, *, tenant_salt: str, adapter: str = "") -> "Namespace":
        return cls(
            fingerprint=card.fingerprint,
            kv_dtype=card.kv_dtype,
            layout=card.layout,
            adapter=adapter,
            tenant_salt=tenant_salt,
        )

    def root(self) -> bytes:
        """The 32-byte root of this namespace's keys: sha256 of its JSON with sorted keys."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).digest()


def chunk_keys(root: bytes, tokens: Sequence[int], chunk_tokens: int) -> list[ChunkKey]:
    """Keys of the whole chunks of a prompt: `len(tokens) // chunk_tokens` of them.

    Raises ValueError where a token id doesn't fit in 32 bits.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    count = len(tokens) // chunk_tokens
    try:
        numbers = array("I", tokens[: count * chunk_tokens])  # packs a list of integers three times as fast as numpy
    except OverflowError as error:
        raise ValueError("token ids must be between 0 and 2**32 - 1") from error
    if sys.byteorder == "big":
        numbers.byteswap()
    packed = memoryview(numbers).cast("B")
    width = 4 * chunk_tokens
    keys: list[ChunkKey] = []
    parent = root
    for begin in range(0, count * width, width):
        chunk = hashlib.sha256(parent)
        chunk.update(packed[begin : begin + width])
        parent = chunk.digest()
        keys.append(ChunkKey(parent))
    return keys


def handover_key(transfer_id: TransferId, index: int) -> ChunkKey:
    """Key of a transfer's partial chunk: found by those who know the transfer, and by nobody else."""
    return ChunkKey(hashlib.sha256(f"handover\0{transfer_id}\0{index}".encode()).digest())
