"""How long an engine takes, which the simulated engine sleeps by and the simulator calculates with. Pure.

    prefill   overhead + max(new tokens · token, weights) + max(pairs · pair, tokens · context)
    step      overhead + max(batch · step token, weights) + context tokens · step context

Linear layers are bound by compute, or by reading the weights once; attention by compute, or by reading KV once. Parts
run one after the other, so each has its own bound (the roofline of Williams, Waterman and Patterson, CACM 2009).
"""

from dataclasses import dataclass

from halfmoon.scheduling.estimates import token_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one engine's work."""

    token_s: float
    """Linear layers of one token of a prompt."""
    prefill_overhead_s: float = 0.0
    weights_s: float = 0.0
    """Reading all weights once."""
    pair_s: float = 0.0
    """Attention of one token of a prompt to one other."""
    context_s: float = 0.0
    """Reading the KV of one token."""
    step_overhead_s: float = 0.0
    step_token_s: float = 0.0
    """One more sequence in a step."""
    step_context_s: float = 0.0
    """One more token of context in a step."""

    @classmethod
    def roofline(
        cls,
        *,
        token_s: float,
        pair_s: float,
        weights_s: float,
        context_s: float,
        prefill_overhead_s: float,
        step_overhead_s: float,
    ) -> "Timing":
        """A token is a token, in a prompt or in a batch."""
        return cls(
            token_s=token_s,
            pair_s=pair_s,
            weights_s=weights_s,
            context_s=context_s,
            prefill_overhead_s=prefill_overhead_s,
            step_overhead_s=step_overhead_s,
            step_token_s=token_s,
            step_context_s=max(pair_s, context_s),
        )

    @classmethod
    def constant(cls, *, prefill_tokens_per_s: float, decode_step_s: float) -> "Timing":
        """As many tokens a second whatever comes before them, and steps as long whatever the batch."""
        return cls(token_s=1 / prefill_tokens_per_s, step_overhead_s=decode_step_s)

    @property
    def tokens_per_s(self) -> float | None:
        """Of prompts, where attention costs nothing yet; None where tokens do neither."""
        return 1 / self.token_s if self.token_s else None

    def prefill_s(self, num_tokens: int, num_reused: int = 0) -> float:
        """A prompt of `num_tokens`, the KV of its first `num_reused` tokens being there."""
        num_new = num_tokens - num_reused
        if num_new <= 0:
            return 0.0
        attention_s = max(token_pairs(num_tokens, num_reused) * self.pair_s, num_tokens * self.context_s)
        return self.prefill_overhead_s + max(num_new * self.token_s, self.weights_s) + attention_s

    def step_s(self, batch: int, context_tokens: float) -> float:
        """One token for each of `batch` sequences that have `context_tokens` in sum."""
        return self.step_base_s(batch) + context_tokens * self.step_context_s

    def step_base_s(self, batch: int) -> float:
        """The part of a step that doesn't depend on the context."""
        return self.step_overhead_s + max(batch * self.step_token_s, self.weights_s)

    def mixed_s(self, batch: int, context_tokens: float, num_new: int, pairs: float, read_tokens: int) -> float:
        """A step that also computes `num_new` tokens of prompts, of so many pairs in sum, next to `read_tokens` of
        them that have, or get, their KV: chunked prefill."""
        linear_s = num_new * self.token_s + batch * self.step_token_s
        attention_s = max(pairs * self.pair_s, read_tokens * self.context_s) + context_tokens * self.step_context_s
        return self.step_overhead_s + max(linear_s, self.weights_s) + attention_s
