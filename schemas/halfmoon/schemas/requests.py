"""Requests and the token events that answer them: what passes between a client and the system.

Anyone with NATS credentials may send and read these; they are the public protocol.
"""

from enum import StrEnum
from typing import Any

from halfmoon.schemas.ids import ModelName, RequestId, TenantId
from halfmoon.schemas.wire import Error, Message


class Sampling(Message, frozen=True):
    """How to choose tokens. Ranges are checked when the message is decoded."""

    max_tokens: int | None = None
    """Completion tokens at most. None: as many as the model's context leaves. 0: none, only the prompt's chunks are
    wanted, in a pool; then no decode worker's engine is used, and the request fails where they don't get there."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    seed: int | None = None
    """The same seed, prompt and model give the same tokens, wherever and in whatever batch they are computed."""
    stop: tuple[str, ...] = ()
    """Generation ends before the first of these strings; it isn't part of the text."""
    logprobs: int | None = None
    """None: off. Otherwise the number of alternatives (0 to 20) beside the chosen token."""
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 0:
            raise ValueError(f"max_tokens must be 0 or more, got {self.max_tokens}")
        if not 0.0 <= self.temperature <= 2.0:
            raise ValueError(f"temperature must be between 0 and 2, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, got {self.top_k}")
        if self.logprobs is not None and not 0 <= self.logprobs <= 20:
            raise ValueError(f"logprobs must be between 0 and 20, got {self.logprobs}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError("seed must fit in 64 bits, signed")
        if len(self.stop) > 16 or any(not s for s in self.stop):
            raise ValueError("stop takes at most 16 strings, none of them empty")


class Encoding(StrEnum):
    """How token events are written: as their reader asked."""

    MSGPACK = "msgpack"
    JSON = "json"


class RequestSubmitted(Message, frozen=True, tag="request.submitted.v1"):
    """One prompt to complete. Exactly one of `tokens`, `prompt` and `messages` is given.

    The reply subject for token events is the header `halfmoon-reply`, or `reply` here, or (for a plain NATS request on
    `halfmoon.generate.<model>`) the message's own reply subject.
    """

    request_id: RequestId | None = None
    """Drawn by the conductor where absent. Submitting an id again within two minutes does nothing."""
    model: ModelName | None = None
    """Taken from the subject where absent."""
    tokens: tuple[int, ...] | None = None
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    """Chat messages as in OpenAI's API; the model's own chat template is applied."""
    sampling: Sampling = Sampling()
    reply: str | None = None
    encoding: Encoding | None = None
    """For the token events; as the request was written, where absent."""
    tenant: TenantId = TenantId("default")
    """Whose cache to use. The gateway takes it from the API key; direct publishers are bounded by NATS permissions."""
    priority: int = 0
    """Higher goes first: among the waiting requests of the same tenant and class, and in a worker's line."""
    deadline_ns: int | None = None
    """Unix nanoseconds; the header `halfmoon-deadline` where absent."""
    service_class: str | None = None
    """One of those that the conductors are set up with: `interactive` (where absent), `batch`, or others."""

    def __post_init__(self) -> None:
        given = [name for name in ("tokens", "prompt", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise ValueError(f"give exactly one of tokens, prompt and messages; found {found}")


class RequestCancel(Message, frozen=True, tag="request.cancel.v1"):
    """Stop a request, wherever it is. Unknown ids are ignored: it may have ended already."""

    request_id: RequestId
    reason: str = "cancelled by the client"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


class TopLogprob(Message, frozen=True):
    token: int
    text: str
    logprob: float


class TokenLogprob(Message, frozen=True):
    """Log probability (natural log, before temperature and truncation) of a chosen token, and its rivals."""

    token: int
    text: str
    """The token alone, decoded; engines leave it empty and the decode service fills it in."""
    logprob: float
    top: tuple[TopLogprob, ...] = ()


class Usage(Message, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens whose KV was found in the pool instead of computed."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Tokens(Message, frozen=True, tag="tokens.v1"):
    """The next tokens. `seq` numbers the first of them within the completion, so a repeat after a hand-over shows."""

    request_id: RequestId
    seq: int
    tokens: tuple[int, ...]
    text: str
    """What these tokens add to the text. May lag behind: a character, or a possible stop string, is held back whole."""
    logprobs: tuple[TokenLogprob, ...] | None = None


class Finished(Message, frozen=True, tag="finished.v1"):
    """The terminal message of a request that succeeded."""

    request_id: RequestId
    seq: int
    """Number of tokens sent: a reader that has seen fewer has lost some."""
    text: str
    """What was held back and now belongs to the text."""
    finish_reason: FinishReason
    usage: Usage


class Failed(Message, frozen=True, tag="failed.v1"):
    """The terminal message of a request that did not succeed; rejected, failed and cancelled alike."""

    request_id: RequestId
    error: Error


TokenEvent = Tokens | Finished | Failed
"""The inbox of a reply subject: any number of `Tokens`, then exactly one of `Finished` and `Failed`."""


ConductorInbox = RequestSubmitted | RequestCancel
"""What the stream `REQUESTS` holds, and what conductors hear on `halfmoon.generate.<model>`."""
