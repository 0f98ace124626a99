"""What the two endpoints have in common: what is asked, and how its answer is written."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from halfmoon.gateway.openai_types import PromptTokensDetails, UsageBody
from halfmoon.gateway.policy import Plan
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.requests import Finished, FinishReason, Sampling, TokenLogprob, Tokens, Usage
from halfmoon.text import TextCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every chunk and every whole answer repeats."""

    id: str
    created_s: int
    model: str
    fingerprint: str
    include_usage: bool
    """Of a stream: whether its last chunk holds the usage."""


@dataclass(slots=True)
class Collected:
    """One choice of an answer that is sent whole."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, event: Tokens) -> None:
        self.text += event.text
        self.logprobs.extend(event.logprobs or ())

    def finish(self, event: Finished) -> None:
        self.text += event.text
        self.finish_reason = event.finish_reason


class Question(Protocol):
    """A request's body, understood; its model isn't known to be served yet."""

    @property
    def model(self) -> str: ...

    @property
    def stream(self) -> bool: ...

    @property
    def include_usage(self) -> bool: ...

    @property
    def sampling(self) -> Sampling: ...

    @property
    def num_choices(self) -> int: ...

    @property
    def service_class(self) -> str | None: ...

    def prompts(self, codec: TextCodec, card: ModelCard) -> list[tuple[list[int], Sampling]]:
        """Token ids and sampling of each prompt, within the model's limits. Slow: call it in a thread.

        Raises `ApiError` 400.
        """
        ...

    def answer(self, head: Head, codec: TextCodec) -> "Answer": ...


class Answer(Protocol):
    """Writes one answer, as chunks or whole."""

    def tokens(self, index: int, event: Tokens) -> list[msgspec.Struct]:
        """The chunks for an event of choice `index`; none where there is nothing to show yet."""
        ...

    def finish(self, index: int, event: Finished) -> list[msgspec.Struct]: ...

    def usage(self, usage: UsageBody) -> msgspec.Struct | None:
        """The last chunk of a stream that asked for it; else None."""
        ...

    def whole(self, choices: Sequence[Collected], usage: UsageBody) -> msgspec.Struct: ...


def usage_of(plan: Plan, usages: Sequence[Usage]) -> UsageBody:
    """Summed over all choices; each prompt counts once, and as cached what no choice of it had to compute."""
    n = plan.num_choices
    cached = sum(min(usage.cached_tokens for usage in usages[at : at + n]) for at in range(0, len(usages), n))
    completion = sum(usage.completion_tokens for usage in usages)
    return UsageBody(
        prompt_tokens=plan.prompt_tokens,
        completion_tokens=completion,
        total_tokens=plan.prompt_tokens + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )
