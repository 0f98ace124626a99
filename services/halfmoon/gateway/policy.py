"""What a request asks of the system: limits, sampling, and which submissions it becomes. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from halfmoon.gateway.errors import ApiError, bad_request, refusal
from halfmoon.gateway.openai_types import ChatRequest, CommonRequest, CompletionRequest
from halfmoon.schemas.ids import ModelName, RequestId, TenantId
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.requests import RequestSubmitted, Sampling
from halfmoon.schemas.wire import ErrorCode

DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of `/v1/completions` where absent; OpenAI's value. Chats may go on to the end of the context."""

_SEEDS = 2**64


@dataclass(frozen=True, slots=True)
class Plan:
    """What is submitted for one HTTP request: choice `p * num_choices + i` is the i-th answer to prompt p."""

    submissions: tuple[RequestSubmitted, ...]
    num_choices: int
    """Per prompt."""
    prompt_tokens: int
    """Each prompt counted once, however many choices it has."""


def chat_sampling(request: ChatRequest) -> Sampling:
    """Raises `ApiError` 400 for what is out of range."""
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("'top_logprobs' needs 'logprobs' to be true", "top_logprobs")
    max_tokens = request.max_completion_tokens
    if max_tokens is not None and request.max_tokens not in (None, max_tokens):
        raise bad_request("'max_tokens' and 'max_completion_tokens' differ; send one of them", "max_tokens")
    renamed = {
        "max_tokens": "max_tokens" if max_tokens is None else "max_completion_tokens",
        "logprobs": "top_logprobs",
    }
    return _sampling(
        request,
        request.max_tokens if max_tokens is None else max_tokens,
        (request.top_logprobs or 0) if request.logprobs else None,
        renamed,
    )


def completion_sampling(request: CompletionRequest) -> Sampling:
    """Raises `ApiError` 400 for what is out of range."""
    return _sampling(request, request.max_tokens, request.logprobs, {})


def _sampling(
    request: CommonRequest, max_tokens: int | None, logprobs: int | None, renamed: dict[str, str]
) -> Sampling:
    stop = request.stop
    try:
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        return Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=request.top_k or 0,
            seed=request.seed,
            stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
            logprobs=logprobs,
            ignore_eos=bool(request.ignore_eos),
        )
    except ValueError as error:
        field, _, rest = str(error).partition(" ")
        name = renamed.get(field, field)
        raise bad_request(f"Invalid '{name}': {name} {rest}", name, "invalid_value") from None


def num_choices(request: CommonRequest, max_choices: int) -> int:
    """`n`. Raises `ApiError` 400."""
    n = 1 if request.n is None else request.n
    if not 1 <= n <= max_choices:
        raise bad_request(f"Invalid 'n': n must be between 1 and {max_choices}, got {n}", "n", "invalid_value")
    return n


def service_class(request: CommonRequest, tiers: Mapping[str, str]) -> str | None:
    """The class of service that `service_tier` asks for; None where it asks for none. Raises `ApiError` 400."""
    tier = request.service_tier
    if tier is None:
        return None
    if tier not in tiers:
        known = ", ".join(f"'{name}'" for name in sorted(tiers))
        raise bad_request(
            f"Invalid 'service_tier': '{tier}' is not known here; there is {known}", "service_tier", "invalid_value"
        )
    return tiers[tier]


def check_stream_options(request: CommonRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise bad_request("'stream_options' is only allowed with 'stream': true", "stream_options")


def prompts_of(request: CompletionRequest, max_prompts: int) -> list[str | list[int]]:
    """The prompts, one or many, each text or token ids. Raises `ApiError` 400."""
    prompt = request.prompt
    prompts: list[str | list[int]]
    if isinstance(prompt, str):
        prompts = [prompt]
    elif prompt and all(isinstance(item, int) for item in prompt):
        prompts = [[item for item in prompt if isinstance(item, int)]]
    else:
        prompts = [item for item in prompt if not isinstance(item, int)]
        if len(prompts) != len(prompt) or len({type(item) for item in prompts}) > 1:
            raise bad_request(
                "Invalid 'prompt': must be a string, a list of strings, a list of token ids, or a list of such lists",
                "prompt",
                "invalid_type",
            )
    if not prompts:
        raise bad_request("Invalid 'prompt': must not be empty", "prompt", "invalid_value")
    if len(prompts) > max_prompts:
        raise bad_request(
            f"Invalid 'prompt': at most {max_prompts} prompts in one request, got {len(prompts)}",
            "prompt",
            "invalid_value",
        )
    return prompts


def check_prompt(tokens: Sequence[int], sampling: Sampling, card: ModelCard, param: str) -> None:
    """Raises `ApiError` 400 for a prompt that can't be served: nothing may be published then."""
    limit = card.max_model_tokens
    if not tokens:
        raise bad_request(f"Invalid '{param}': the prompt is empty; it needs at least one token", param, "empty_prompt")
    if min(tokens) < 0 or max(tokens) >= card.vocab_size:
        raise bad_request(f"Invalid '{param}': token ids are from 0 to {card.vocab_size - 1}", param, "invalid_value")
    if len(tokens) >= limit:
        raise _too_long(
            f"The prompt has {len(tokens)} tokens; this model takes {limit} for prompt and completion together, so a "
            f"prompt may have {limit - 1} at most",
            param,
        )
    if sampling.max_tokens is not None and len(tokens) + sampling.max_tokens > limit:
        raise _too_long(
            f"The prompt has {len(tokens)} tokens and max_tokens is {sampling.max_tokens}: together more than the "
            f"{limit} that this model takes; ask for {limit - len(tokens)} at most, or shorten the prompt",
            param,
        )


def with_default_length(sampling: Sampling, tokens: Sequence[int], card: ModelCard) -> Sampling:
    """A completion's sampling, with the endpoint's default length where the request gives none."""
    if sampling.max_tokens is not None:
        return sampling
    room = max(1, card.max_model_tokens - len(tokens))
    return msgspec.structs.replace(sampling, max_tokens=min(DEFAULT_COMPLETION_TOKENS, room))


def fan_out(
    request_id: RequestId,
    model: ModelName,
    tenant: TenantId,
    prompts: Sequence[tuple[Sequence[int], Sampling]],
    num_choices: int,
    service_class: str | None = None,
) -> Plan:
    """One submission for each choice of each prompt. A single one has the request's own id; others `<id>-<index>`.

    Choice i of any prompt has seed + i: choices differ, and a prompt's answers don't depend on the prompts beside it.
    """
    submissions = []
    for at, (tokens, sampling) in enumerate(prompts):
        for choice in range(num_choices):
            index = at * num_choices + choice
            alone = len(prompts) * num_choices == 1
            submissions.append(
                RequestSubmitted(
                    request_id=request_id if alone else RequestId(f"{request_id}-{index}"),
                    model=model,
                    tokens=tuple(tokens),
                    sampling=msgspec.structs.replace(sampling, seed=_seed(sampling.seed, choice)),
                    tenant=tenant,
                    service_class=service_class,
                )
            )
    return Plan(tuple(submissions), num_choices, sum(len(tokens) for tokens, _ in prompts))


def unknown_model(asked: str, served: str) -> ApiError:
    error = refusal(
        ErrorCode.MODEL_NOT_FOUND, f"The model '{asked}' does not exist here; this gateway serves '{served}'"
    )
    error.detail = msgspec.structs.replace(error.detail, param="model")
    return error


def _seed(seed: int | None, choice: int) -> int | None:
    if seed is None:
        return None
    return (seed + choice + _SEEDS // 2) % _SEEDS - _SEEDS // 2


def _too_long(message: str, param: str) -> ApiError:
    return bad_request(message, param, "context_length_exceeded")
