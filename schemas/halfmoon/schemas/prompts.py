"""What a conductor is asked about a prompt without running it. Request-reply on `halfmoon.conductor.<verb>`."""

from typing import Any

from halfmoon.schemas.ids import ChunkKey, ModelName, TenantId
from halfmoon.schemas.wire import Error, Message


class PromptKeys(Message, frozen=True, tag="conductor.keys.v1"):
    """Which whole chunks does this prompt have? Exactly one of `tokens`, `prompt` and `messages` is given."""

    model: ModelName | None = None
    """May be left out where one model is served."""
    tenant: TenantId = TenantId("default")
    tokens: tuple[int, ...] | None = None
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("tokens", "prompt", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of tokens, prompt and messages; found {' and '.join(given) or 'none'}")


class PromptChunks(Message, frozen=True, tag="conductor.chunks.v1"):
    """As the gateway, conductors and engines cut it: equal keys mean equal KV."""

    model: ModelName
    tenant: TenantId
    num_tokens: int
    chunk_tokens: int
    keys: tuple[ChunkKey, ...]
    """Of the whole chunks, from the first on; what is left of the prompt is in none."""


ConductorRequest = PromptKeys
ConductorReply = PromptChunks | Error
