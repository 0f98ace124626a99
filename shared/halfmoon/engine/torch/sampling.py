"""Logits into tokens, reproducibly.

A token is drawn by inverting the cumulative distribution at a number that depends on (seed, position) alone: a
counter-based generator in the sense of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11), with
BLAKE2b as the bijection. So neither the batch nor the worker nor an interruption changes what is drawn.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from halfmoon.schemas.requests import Sampling, TokenLogprob, TopLogprob

_FIRST_CANDIDATES = 256
"""Tokens among which top_p is sought at first; nearly always enough."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One row to sample."""

    sampling: Sampling
    seed: int
    position: int
    """Index of the token in the completion."""


@dataclass(frozen=True, slots=True)
class Drawn:
    token: int
    logprob: TokenLogprob | None


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), uniform over seeds and positions; 53 random bits."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    """One token per row of `logits`, `[rows][vocabulary]`, any float type."""
    logits = logits.float()
    greedy = logits.argmax(dim=-1).tolist()
    result = []
    for row, draw in enumerate(draws):
        token = greedy[row] if draw.sampling.temperature == 0 else _draw(logits[row], draw)
        result.append(Drawn(token, _logprob(logits[row], token, draw.sampling.logprobs)))
    return result


def _draw(logits: torch.Tensor, draw: Draw) -> int:
    sampling = draw.sampling
    point = uniform(draw.seed, draw.position)
    scaled = logits.double() / sampling.temperature
    vocabulary = scaled.shape[0]
    has_top_k = 0 < sampling.top_k < vocabulary
    if not has_top_k and sampling.top_p == 1.0:
        return _invert(scaled.softmax(dim=-1), point)
    count = sampling.top_k if has_top_k else min(_FIRST_CANDIDATES, vocabulary)
    while True:
        ordered, tokens = _likeliest(scaled, count)
        # What top_k has left is a distribution of its own; without it, that of all tokens is cut.
        probabilities = (ordered - (ordered if has_top_k else scaled).logsumexp(dim=-1)).exp()
        # The smallest set of likeliest tokens that reaches top_p: all whose predecessors stay below it.
        kept = max(1, int((probabilities.cumsum(dim=-1) - probabilities < sampling.top_p).sum()))
        if kept < count or has_top_k or count == vocabulary:
            return int(tokens[_invert(probabilities[:kept], point)])
        count = min(8 * count, vocabulary)


def _likeliest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` highest scores and their tokens, in order; equal ones are ranked by token id, on every machine.

    To sort a whole vocabulary instead takes as long for 16 rows as a small model takes to compute them.
    """
    lowest = scores.topk(count).values[-1]
    tokens = (scores >= lowest).nonzero().flatten()
    ordered, order = scores[tokens].sort(descending=True, stable=True)
    return ordered[:count], tokens[order[:count]]


def _invert(probabilities: torch.Tensor, point: float) -> int:
    """Index at which the cumulative distribution passes `point` (of its total, which may not be 1)."""
    cumulative = probabilities.cumsum(dim=-1)
    index = int(torch.searchsorted(cumulative, point * cumulative[-1], right=True))
    return min(index, probabilities.shape[0] - 1)


def _logprob(logits: torch.Tensor, token: int, num_top: int | None) -> TokenLogprob | None:
    if num_top is None:
        return None
    logprobs = logits.log_softmax(dim=-1)
    top: tuple[TopLogprob, ...] = ()
    if num_top:
        values, tokens = logprobs.topk(min(num_top, logprobs.shape[0]))
        top = tuple(
            TopLogprob(token=rival, text="", logprob=value)
            for rival, value in zip(tokens.tolist(), values.tolist(), strict=True)
        )
    return TokenLogprob(token=token, text="", logprob=float(logprobs[token]), top=top)
