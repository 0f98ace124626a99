"""What every engine refuses before it does anything: calls that can't be right. Each raises ValueError."""

from collections.abc import Sequence

from halfmoon.engine.contract import ChunkSink, DecodeSpec, SequenceSpec
from halfmoon.schemas.model import ModelCard


def check_spec(spec: SequenceSpec, kv_tokens: int) -> None:
    """Whether the sequence could ever be held in a KV of `kv_tokens`."""
    if not spec.tokens:
        raise ValueError("a sequence needs at least one token")
    if spec.max_tokens < len(spec.tokens):
        raise ValueError(f"max_tokens {spec.max_tokens} is less than the {len(spec.tokens)} tokens given")
    if spec.max_tokens > kv_tokens:
        raise ValueError(f"a sequence of {spec.max_tokens} tokens can't fit in a KV of {kv_tokens}")


def check_load(card: ModelCard, num_prompt_tokens: int, index: int, num_tokens: int, payload: memoryview) -> None:
    start = index * card.chunk_tokens
    if index < 0 or not 0 < num_tokens <= card.chunk_tokens:
        raise ValueError(f"chunk {index} of {num_tokens} tokens can't be: chunks have {card.chunk_tokens}")
    if start + num_tokens > num_prompt_tokens:
        raise ValueError(f"chunk {index} ends at {start + num_tokens}, the prompt at {num_prompt_tokens}")
    _check_bytes(card, num_tokens, payload)


def check_sinks(card: ModelCard, num_prompt_tokens: int, start: int, stop: int, sinks: Sequence[ChunkSink]) -> None:
    """Whether the sinks cover `[start, stop)` without gaps, and can be written."""
    position = start
    for sink in sinks:
        if sink.index * card.chunk_tokens != position:
            raise ValueError(f"sink {sink.index} begins at {sink.index * card.chunk_tokens}, expected {position}")
        if not 0 < sink.num_tokens <= card.chunk_tokens:
            raise ValueError(f"sink {sink.index} of {sink.num_tokens} tokens can't be: chunks have {card.chunk_tokens}")
        _check_bytes(card, sink.num_tokens, sink.payload)
        if sink.payload.readonly:
            raise ValueError(f"the payload of sink {sink.index} can't be written")
        position += sink.num_tokens
    if position != stop or not start < stop <= num_prompt_tokens:
        raise ValueError(f"the sinks end at {position}, the range is [{start}, {stop}) of {num_prompt_tokens} tokens")


def check_decode(spec: SequenceSpec, num_computed: int) -> DecodeSpec:
    """How to generate, where that can begin behind `num_computed` tokens."""
    if spec.decode is None:
        raise ValueError(f"sequence {spec.seq_id} was opened without a DecodeSpec: it can only be prefilled")
    num_prompt_tokens = len(spec.tokens)
    if not 0 <= num_computed < num_prompt_tokens:
        raise ValueError(f"num_computed {num_computed} must leave at least one of {num_prompt_tokens} tokens")
    return spec.decode


def _check_bytes(card: ModelCard, num_tokens: int, payload: memoryview) -> None:
    expected = card.payload_bytes(num_tokens)
    if payload.nbytes != expected:
        raise ValueError(f"a payload of {num_tokens} tokens has {expected} bytes, this one {payload.nbytes}")
