"""OpenAI's JSON, as far as it is spoken here: requests in, answers out.

Field names, nesting and nulls are the API's. https://platform.openai.com/docs/api-reference
"""

from typing import Any, Literal

import msgspec

from halfmoon.schemas.requests import FinishReason


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class CommonRequest(msgspec.Struct, kw_only=True):
    """What both endpoints take. None is what the API calls absent: clients send nulls."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """Not in OpenAI's API; 0 is off."""
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    service_tier: str | None = None
    ignore_eos: bool | None = None
    """Not in OpenAI's API: for measurements."""


class ChatRequest(CommonRequest, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionRequest(CommonRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int


class UsageBody(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class LogprobAlternative(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class LogprobEntry(LogprobAlternative, frozen=True, kw_only=True):
    top_logprobs: list[LogprobAlternative]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[LogprobEntry]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]] | None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    system_fingerprint: str


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET
    """Absent, unless asked for; then null in all chunks but the last."""


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Whole, or (OpenAI's streams of this endpoint look the same) one chunk."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET
    system_fingerprint: str


class ModelBody(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "halfmoon"
    max_model_len: int
    """Not in OpenAI's API: prompt and completion together, in tokens."""
    engine: str
    """Not in OpenAI's API: `torch`, `vllm`; `sim` is a simulation, whose text means nothing."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelBody]
