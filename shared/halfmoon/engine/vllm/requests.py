"""Sequences as vLLM's requests: what it is asked for, what it generates, and how fast."""

import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from halfmoon.engine.contract import ChunkWritten, Sampled, SequenceSpec
from halfmoon.schemas.requests import TokenLogprob, TopLogprob

_SMOOTHING = 0.2
"""Weight of the newest measurement in the running means."""


def sampling_params(spec: SequenceSpec, number: int, num_loadable: int, *, has_sinks: bool) -> Any:
    """vLLM's `SamplingParams`. A sequence that is only prefilled samples one token, since vLLM has to."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from halfmoon.engine.vllm import metadata, sampling

    connector = {"seq": number, "num_loadable": num_loadable, "has_sinks": has_sinks}
    extra: dict[str, Any] = {"kv_transfer_params": {metadata.PARAMETERS: connector}}
    max_tokens, logprobs, stop_tokens = 1, None, []
    if spec.decode is not None:
        asked = spec.decode.sampling
        room = spec.max_tokens - len(spec.tokens)
        wanted = room if asked.max_tokens is None else min(room, asked.max_tokens - spec.decode.num_known)
        max_tokens, logprobs, stop_tokens = max(1, wanted), asked.logprobs, sorted(spec.decode.stop_tokens)
        if asked.temperature > 0:
            extra[sampling.PARAMETERS] = sampling.parameters(asked, spec.decode.seed, spec.decode.num_known)
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        stop_token_ids=stop_tokens,
        ignore_eos=True,
        logprobs=logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=extra,
    )


async def sampled_tokens(
    llm: Any, prompt: Mapping[str, Any], params: Any, request_id: str, num_known: int
) -> AsyncGenerator[Sampled]:
    """The request's tokens, until it ends. Closing the iterator aborts it."""
    position = num_known
    outputs = llm.generate(prompt, params, request_id)
    try:
        async for output in outputs:
            completion = output.outputs[0]
            logprobs = completion.logprobs or [None] * len(completion.token_ids)
            for token, alternatives in zip(completion.token_ids, logprobs, strict=True):
                yield Sampled(position, token, _logprob(token, alternatives, params.logprobs))
                position += 1
    finally:
        await outputs.aclose()


def _logprob(token: int, alternatives: Any, num_top: int | None) -> TokenLogprob | None:
    """vLLM gives the chosen token and the `num_top` likeliest, by token, with their ranks from 1."""
    if alternatives is None or num_top is None:
        return None
    rivals = sorted((each.rank, rival, each.logprob) for rival, each in alternatives.items() if each.rank <= num_top)
    top = tuple(TopLogprob(token=rival, text="", logprob=logprob) for _, rival, logprob in rivals)
    return TokenLogprob(token=token, text="", logprob=alternatives[token].logprob, top=top)


class Pace:
    """How fast the engine is, from what comes out of it."""

    def __init__(self) -> None:
        self.num_steps = 0
        """Tokens and chunks: vLLM doesn't tell of its steps."""
        self.prefill_tokens_per_s: float | None = None
        self.decode_step_s: float | None = None
        self._last_s: dict[str, float] = {}

    def computed(self, written: ChunkWritten, num_tokens: int) -> None:
        self.num_steps += 1
        duration_s = (written.finished_ns - written.started_ns) / 1e9
        if not written.is_hot and duration_s > 0:
            self.prefill_tokens_per_s = _smooth(self.prefill_tokens_per_s, num_tokens / duration_s)

    def sampled(self, seq_id: str, *, is_first: bool) -> None:
        self.num_steps += 1
        now_s = time.monotonic()
        last_s = self._last_s.get(seq_id)
        self._last_s[seq_id] = now_s
        if last_s is not None and not is_first:
            self.decode_step_s = _smooth(self.decode_step_s, now_s - last_s)

    def forget(self, seq_id: str) -> None:
        self._last_s.pop(seq_id, None)


def _smooth(mean: float | None, newest: float) -> float:
    return newest if mean is None else (1 - _SMOOTHING) * mean + _SMOOTHING * newest
