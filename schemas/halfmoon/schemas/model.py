"""What a worker says about the model that it serves."""

import operator

from halfmoon.schemas.ids import ModelName
from halfmoon.schemas.wire import Message

KV_FIELDS = ("fingerprint", "kv_dtype", "layout", "chunk_tokens", "kv_bytes_per_token", "block_tokens")
"""Fields of a card in which two workers must agree to pass KV between them."""
_KV_IDENTITY = operator.attrgetter(*KV_FIELDS)


class ModelCard(Message, frozen=True):
    """Everything that decides whether two workers can share KV, and what a request may ask of them."""

    name: ModelName
    engine: str
    """`torch`, `vllm` or `sim`. A simulated worker says so here, and wherever it shows."""
    fingerprint: str
    """Hex sha256 over config and weights."""
    kv_dtype: str
    """Element type of the payload: `float32`, `bfloat16`, `float16`."""
    layout: str
    """Name of the payload's layout; `lktHd.v1` is the canonical `[layer][k, v][token][kv head][head dim]`."""
    kv_bytes_per_token: int
    chunk_tokens: int
    max_model_tokens: int
    """Prompt and completion together."""
    vocab_size: int
    block_tokens: int = 1
    """Payloads hold whole blocks of this many tokens, the last one padded. Chunks are a multiple of it."""

    @property
    def kv_identity(self) -> tuple[str | int, ...]:
        """Equal for workers that can pass KV between them, and for no others: the values of `KV_FIELDS`."""
        identity: tuple[str | int, ...] = _KV_IDENTITY(self)
        return identity

    def payload_bytes(self, num_tokens: int) -> int:
        """Size of the KV of `num_tokens` consecutive positions, the first at a chunk's begin."""
        num_blocks = -(-num_tokens // self.block_tokens)
        return num_blocks * self.block_tokens * self.kv_bytes_per_token
