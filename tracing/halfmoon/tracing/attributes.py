"""Names of span attributes, and the facts of one chunk as attributes.

OpenTelemetry's GenAI semantic conventions where they have a name, `halfmoon.` elsewhere. Prompt and completion text is
never an attribute: the conventions' `gen_ai.input.messages` and its kin are left out on purpose.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from halfmoon.schemas.chunks import ChunkOutcome
from halfmoon.schemas.ids import ChunkKey, NodeId, RequestId

Scalar = str | bool | int | float
AttributeValue = Scalar | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]
Attributes = Mapping[str, AttributeValue]
"""What every version of OpenTelemetry takes."""

REQUEST_ID: Final = "halfmoon.request_id"
TRANSFER_ID: Final = "halfmoon.transfer_id"
NODE: Final = "halfmoon.node"
WORKER: Final = "halfmoon.worker"
TENANT: Final = "halfmoon.tenant"
SERVICE_CLASS: Final = "halfmoon.service_class"
TTFT_MS: Final = "halfmoon.ttft_ms"
"""Float, on `gateway.request`: from the request's arrival to its first token's departure. The only TTFT there is."""

CHUNK_KEY: Final = "halfmoon.chunk.key"
"""The key's 32 bytes in hex."""
CHUNK_INDEX: Final = "halfmoon.chunk.index"
CHUNK_TIER: Final = "halfmoon.chunk.tier"
CHUNK_BYTES: Final = "halfmoon.chunk.bytes"
CHUNK_TOKENS: Final = "halfmoon.chunk.tokens"
CHUNK_SOURCE: Final = "halfmoon.chunk.source"
CHUNK_DESTINATION: Final = "halfmoon.chunk.destination"
CHUNK_QUEUE_WAIT_MS: Final = "halfmoon.chunk.queue_wait_ms"
CHUNK_TRANSFER_MS: Final = "halfmoon.chunk.transfer_ms"
CHUNK_TRANSPORT: Final = "halfmoon.chunk.transport"
CHUNK_OUTCOME: Final = "halfmoon.chunk.outcome"
CHUNK_IN_PLACE: Final = "halfmoon.chunk.in_place"
"""True where the reader looked into the source's own slot: nothing was copied into its node's pool."""

GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"
"""`chat` or `text_completion`."""
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_REQUEST_SEED: Final = "gen_ai.request.seed"
GEN_AI_REQUEST_STREAM: Final = "gen_ai.request.stream"
GEN_AI_REQUEST_CHOICE_COUNT: Final = "gen_ai.request.choice.count"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"

ERROR_TYPE: Final = "error.type"
"""The general convention's name: the exception's class, or an `ErrorCode`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFacts:
    """What is known of one chunk at one place; what is None is left out of the attributes."""

    request_id: RequestId | None = None
    key: ChunkKey | None = None
    """None for a prompt's last, partial chunk, which has no key."""
    index: int
    """Place in the prompt, from 0."""
    outcome: ChunkOutcome | None = None
    tier: str | None = None
    num_bytes: int | None = None
    num_tokens: int | None = None
    source: NodeId | None = None
    destination: NodeId | None = None
    transport: str | None = None
    """`shm`, `tcp`, `rdma`; None where nothing moved."""
    queue_wait_ms: float | None = None
    transfer_ms: float | None = None
    in_place: bool | None = None

    def attributes(self) -> dict[str, AttributeValue]:
        facts: dict[str, AttributeValue | None] = {
            REQUEST_ID: self.request_id,
            CHUNK_KEY: self.key.hex() if self.key is not None else None,
            CHUNK_INDEX: self.index,
            CHUNK_OUTCOME: self.outcome.value if self.outcome is not None else None,
            CHUNK_TIER: str(self.tier) if self.tier is not None else None,
            CHUNK_BYTES: self.num_bytes,
            CHUNK_TOKENS: self.num_tokens,
            CHUNK_SOURCE: self.source,
            CHUNK_DESTINATION: self.destination,
            CHUNK_TRANSPORT: self.transport,
            CHUNK_QUEUE_WAIT_MS: self.queue_wait_ms,
            CHUNK_TRANSFER_MS: self.transfer_ms,
            CHUNK_IN_PLACE: self.in_place,
        }
        return {name: value for name, value in facts.items() if value is not None}
