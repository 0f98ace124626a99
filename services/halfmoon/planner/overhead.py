"""What services add to first tokens: messages, decisions, leases, handing KV over. From requests that were recorded."""

import statistics
from collections import deque
from collections.abc import Sequence

from halfmoon.scheduling.estimates import token_pairs
from halfmoon.schemas.splits import HalfEnded

MAX_REQUESTS = 4_096
MIN_REQUESTS = 20
"""Of fewer, none need have found everything idle."""

Fit = tuple[float, float, float]


class Overhead:
    """Of one model. Its fits say what computing takes; the rest of a first token's time is overhead, and waiting.

    Who waited for nobody is not known. But few wait in a system that isn't full: the tenth percentile of the rests
    stands for the overhead.
    """

    def __init__(self) -> None:
        self._ended: deque[tuple[float, int, int]] = deque(maxlen=MAX_REQUESTS)
        """Seconds from a half's acceptance to the first token, tokens of the prompt, and those of them reused."""

    def hear(self, ended: HalfEnded) -> None:
        if ended.ttft_s is not None and ended.usage is not None:
            self._ended.append((ended.ttft_s, ended.usage.prompt_tokens, ended.usage.cached_tokens))

    def seconds(self, prefill: Fit, step: Fit) -> float | None:
        """None where too few were heard."""
        if len(self._ended) < MIN_REQUESTS:
            return None
        rests = [
            ttft_s
            - _dot(prefill, (1, num_tokens - num_reused, token_pairs(num_tokens, num_reused)))
            - _dot(step, (1, 1, num_tokens))
            for ttft_s, num_tokens, num_reused in self._ended
        ]
        return max(0.0, statistics.quantiles(rests, n=10)[0])


def _dot(coefficients: Fit, features: Sequence[float]) -> float:
    return sum(coefficient * feature for coefficient, feature in zip(coefficients, features, strict=True))
