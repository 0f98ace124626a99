"""halfmoon's sampling inside vLLM: a token depends on (seed, position) alone, so that another worker can go on.

vLLM draws from a generator per request, whose state doesn't travel. So it is asked for the likeliest token, and this
processor has made the token that halfmoon draws the only possible one. Logprobs are taken from before that.
"""

from typing import Any

import msgspec
import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.interface import MoveDirectionality

from halfmoon.engine.torch.sampling import Draw, sample
from halfmoon.schemas.requests import Sampling

PARAMETERS = "halfmoon_sampling"
"""Key in `SamplingParams.extra_args`."""


def parameters(sampling: Sampling, seed: int, num_known: int) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": seed,
        "num_known": num_known,
    }


class _Row(msgspec.Struct):
    sampling: Sampling
    seed: int
    num_known: int
    generated: list[int]
    """The request's own list: it grows as vLLM appends to it."""


class CounterSampling(LogitsProcessor):  # type: ignore[misc]
    """Loaded by vLLM in the process of each rank."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, generated in batch_update.added:
            self._rows.pop(index, None)
            given = (params.extra_args or {}).get(PARAMETERS)
            if given is not None:
                sampling = Sampling(temperature=given["temperature"], top_p=given["top_p"], top_k=given["top_k"])
                self._rows[index] = _Row(sampling, given["seed"], given["num_known"], generated)
        for source, target, direction in batch_update.moved:
            moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if replaced is not None and direction is MoveDirectionality.SWAP:
                self._rows[source] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, row in self._rows.items():
            draw = Draw(row.sampling, row.seed, row.num_known + len(row.generated))
            [drawn] = sample(logits[index : index + 1], [draw])
            logits[index] = float("-inf")
            logits[index, drawn.token] = 0.0
        return logits
