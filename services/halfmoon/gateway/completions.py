"""`/v1/completions`: its question and its answer."""

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from halfmoon.gateway import policy
from halfmoon.gateway.config import GatewayConfig
from halfmoon.gateway.errors import bad_request
from halfmoon.gateway.logprobs import CompletionLogprobWriter
from halfmoon.gateway.openai_types import Completion, CompletionChoice, CompletionRequest, UsageBody
from halfmoon.gateway.parameters import parse
from halfmoon.gateway.rendering import Answer, Collected, Head
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.requests import Finished, FinishReason, Sampling, TokenLogprob, Tokens
from halfmoon.text import TextCodec, TextError


class CompletionQuestion:
    """Raises `ApiError` 400 for a body that can't be understood."""

    def __init__(self, body: bytes, config: GatewayConfig) -> None:
        self._request = parse(body, CompletionRequest)
        policy.check_stream_options(self._request)
        self._prompts = policy.prompts_of(self._request, config.max_prompts)
        self.model = self._request.model
        self.stream = bool(self._request.stream)
        self.include_usage = bool(self._request.stream_options and self._request.stream_options.include_usage)
        self.sampling = policy.completion_sampling(self._request)
        self.num_choices = policy.num_choices(self._request, config.max_choices)
        self.service_class = policy.service_class(self._request, config.service_tiers)

    def prompts(self, codec: TextCodec, card: ModelCard) -> list[tuple[list[int], Sampling]]:
        prepared = []
        for prompt in self._prompts:
            try:
                tokens = codec.encode(prompt) if isinstance(prompt, str) else prompt
            except TextError as error:
                raise bad_request(f"Invalid 'prompt': {error}", "prompt", "invalid_value") from error
            policy.check_prompt(tokens, self.sampling, card, "prompt")
            prepared.append((tokens, policy.with_default_length(self.sampling, tokens, card)))
        return prepared

    def answer(self, head: Head, codec: TextCodec) -> Answer:
        return CompletionAnswer(head, codec)


class CompletionAnswer:
    def __init__(self, head: Head, codec: TextCodec) -> None:
        self._head = head
        self._logprobs: defaultdict[int, CompletionLogprobWriter] = defaultdict(lambda: CompletionLogprobWriter(codec))

    def tokens(self, index: int, event: Tokens) -> list[msgspec.Struct]:
        if not event.text and not event.logprobs:
            return []
        return [self._chunk([self._choice(index, event.text, event.logprobs, None)])]

    def finish(self, index: int, event: Finished) -> list[msgspec.Struct]:
        return [self._chunk([self._choice(index, event.text, None, event.finish_reason)])]

    def usage(self, usage: UsageBody) -> msgspec.Struct | None:
        return self._completion([], usage) if self._head.include_usage else None

    def whole(self, choices: Sequence[Collected], usage: UsageBody) -> msgspec.Struct:
        return self._completion(
            [
                self._choice(index, choice.text, tuple(choice.logprobs), choice.finish_reason)
                for index, choice in enumerate(choices)
            ],
            usage,
        )

    def _choice(
        self, index: int, text: str, logprobs: tuple[TokenLogprob, ...] | None, finish_reason: FinishReason | None
    ) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs[index].write(logprobs) if logprobs else None,
            finish_reason=finish_reason,
        )

    def _chunk(self, choices: list[CompletionChoice]) -> Completion:
        return self._completion(choices, None if self._head.include_usage else msgspec.UNSET)

    def _completion(self, choices: list[CompletionChoice], usage: UsageBody | msgspec.UnsetType | None) -> Completion:
        head = self._head
        return Completion(
            id=head.id,
            created=head.created_s,
            model=head.model,
            system_fingerprint=head.fingerprint,
            choices=choices,
            usage=usage,
        )
