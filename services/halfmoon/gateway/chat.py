"""`/v1/chat/completions`: its question and its answer."""

from collections.abc import Sequence

import msgspec

from halfmoon.gateway import policy
from halfmoon.gateway.config import GatewayConfig
from halfmoon.gateway.errors import bad_request
from halfmoon.gateway.logprobs import chat_logprobs
from halfmoon.gateway.openai_types import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    ChatRequest,
    UsageBody,
)
from halfmoon.gateway.parameters import parse
from halfmoon.gateway.rendering import Answer, Collected, Head
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.requests import Finished, FinishReason, Sampling, TokenLogprob, Tokens
from halfmoon.text import TextCodec, TextError


class ChatQuestion:
    """Raises `ApiError` 400 for a body that can't be understood."""

    def __init__(self, body: bytes, config: GatewayConfig) -> None:
        self._request = parse(body, ChatRequest)
        policy.check_stream_options(self._request)
        self.model = self._request.model
        self.stream = bool(self._request.stream)
        self.include_usage = bool(self._request.stream_options and self._request.stream_options.include_usage)
        self.sampling = policy.chat_sampling(self._request)
        self.num_choices = policy.num_choices(self._request, config.max_choices)
        self.service_class = policy.service_class(self._request, config.service_tiers)

    def prompts(self, codec: TextCodec, card: ModelCard) -> list[tuple[list[int], Sampling]]:
        try:
            tokens = codec.encode_chat(self._request.messages)
        except TextError as error:
            raise bad_request(f"Invalid 'messages': {error}", "messages", "invalid_value") from error
        policy.check_prompt(tokens, self.sampling, card, "messages")
        return [(tokens, self.sampling)]

    def answer(self, head: Head, codec: TextCodec) -> Answer:
        return ChatAnswer(head, codec)


class ChatAnswer:
    def __init__(self, head: Head, codec: TextCodec) -> None:
        self._head = head
        self._codec = codec
        self._begun: set[int] = set()

    def tokens(self, index: int, event: Tokens) -> list[msgspec.Struct]:
        chunks = self._opening(index)
        if event.text or event.logprobs:
            chunks.append(self._chunk(index, ChatDelta(content=event.text), logprobs=event.logprobs))
        return chunks

    def finish(self, index: int, event: Finished) -> list[msgspec.Struct]:
        chunks = self._opening(index)
        if event.text:
            chunks.append(self._chunk(index, ChatDelta(content=event.text)))
        chunks.append(self._chunk(index, ChatDelta(), finish_reason=event.finish_reason))
        return chunks

    def usage(self, usage: UsageBody) -> msgspec.Struct | None:
        head = self._head
        if not head.include_usage:
            return None
        return ChatChunk(
            id=head.id,
            created=head.created_s,
            model=head.model,
            system_fingerprint=head.fingerprint,
            choices=[],
            usage=usage,
        )

    def whole(self, choices: Sequence[Collected], usage: UsageBody) -> msgspec.Struct:
        head = self._head
        return ChatCompletion(
            id=head.id,
            created=head.created_s,
            model=head.model,
            system_fingerprint=head.fingerprint,
            choices=[
                ChatChoice(
                    index=index,
                    message=ChatMessage(content=choice.text),
                    logprobs=chat_logprobs(tuple(choice.logprobs), self._codec) if choice.logprobs else None,
                    finish_reason=choice.finish_reason or FinishReason.STOP,
                )
                for index, choice in enumerate(choices)
            ],
            usage=usage,
        )

    def _opening(self, index: int) -> list[msgspec.Struct]:
        """A choice's first chunk says who speaks."""
        if index in self._begun:
            return []
        self._begun.add(index)
        return [self._chunk(index, ChatDelta(role="assistant", content=""))]

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        *,
        logprobs: tuple[TokenLogprob, ...] | None = None,
        finish_reason: FinishReason | None = None,
    ) -> ChatChunk:
        head = self._head
        choice = ChatChunkChoice(
            index=index,
            delta=delta,
            logprobs=chat_logprobs(logprobs, self._codec) if logprobs else None,
            finish_reason=finish_reason,
        )
        return ChatChunk(
            id=head.id,
            created=head.created_s,
            model=head.model,
            system_fingerprint=head.fingerprint,
            choices=[choice],
            usage=None if head.include_usage else msgspec.UNSET,
        )
