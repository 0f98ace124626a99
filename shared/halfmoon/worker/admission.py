"""Whether a worker takes a half: a pure decision, answered at once."""

from dataclasses import dataclass

from halfmoon.schemas.ids import ModelName
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.wire import Error, ErrorCode

RETRY_AFTER_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy a worker is."""

    num_halves: int
    """Running and waiting."""
    max_requests: int
    max_queue: int
    draining: bool


def busy(load: Load) -> Error | None:
    """The refusal of one more half, with its reason; None where there is room."""
    if load.draining:
        return Error(code=ErrorCode.BUSY, message="this worker is draining: it finishes what it has and stops")
    limit = load.max_requests + load.max_queue
    if load.num_halves >= limit:
        return Error(
            code=ErrorCode.BUSY,
            message=f"the queue is full: {load.num_halves} requests are here, {load.max_requests} of them running",
            retry_after_s=RETRY_AFTER_S,
        )
    return None


def unservable(card: ModelCard, model: ModelName, tokens: tuple[int, ...], kv_tokens: int) -> Error | None:
    """Why this prompt can't be computed here at any time; None where it can. `kv_tokens`: the engine's whole KV."""
    if model != card.name:
        return Error(code=ErrorCode.MODEL_NOT_FOUND, message=f"this worker serves {card.name!r}, not {model!r}")
    if not tokens:
        return Error(code=ErrorCode.INVALID_REQUEST, message="the prompt is empty; it needs at least one token")
    if not 0 <= min(tokens) <= max(tokens) < card.vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < card.vocab_size)
        return Error(
            code=ErrorCode.INVALID_REQUEST,
            message=f"token id {wrong} is not in the model's vocabulary of {card.vocab_size}",
        )
    limit = min(card.max_model_tokens, kv_tokens)
    if len(tokens) >= limit:
        return Error(
            code=ErrorCode.PROMPT_TOO_LONG,
            message=f"the prompt has {len(tokens)} tokens; with its completion, at most {limit} fit on this worker",
        )
    return None
