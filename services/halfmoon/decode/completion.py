"""A completion as it grows: tokens in, text out, and when it ends. Pure but for the tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass

from halfmoon.engine.contract import Sampled
from halfmoon.schemas.requests import FinishReason, Sampling, TokenLogprob, TopLogprob
from halfmoon.text import StopScanner, TextCodec


@dataclass(frozen=True, slots=True)
class Piece:
    """One token, and what it adds to the text."""

    token: int
    text: str
    logprob: TokenLogprob | None = None


class Completion:
    """Counts, decodes and ends one completion.

    A token that ends it (end of sequence, or the last of a stop string) is part of the tokens and of the usage, and not
    of the text.
    """

    def __init__(self, codec: TextCodec, prompt: Sequence[int], sampling: Sampling, max_tokens: int) -> None:
        self._codec = codec
        self._detokenizer = codec.detokenizer(prompt)
        self._scanner = StopScanner(sampling.stop)
        self._max_tokens = max_tokens
        self.stop_tokens = frozenset[int]() if sampling.ignore_eos else codec.eos_tokens
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._stopped = False

    def resume(self, known: Sequence[int]) -> None:
        """Count tokens that the client has already: the text goes on behind them, and they may have ended it."""
        for token in known:
            if self.finish_reason is None:
                self.push(Sampled(self.num_tokens, token))
        self._end_at_limit()

    def push(self, sampled: Sampled) -> Piece:
        """Take the next token. Afterwards `finish_reason` says whether it was the last."""
        if sampled.position != self.num_tokens or self.finish_reason is not None:
            raise ValueError(f"token {sampled.position} can't follow {self.num_tokens} tokens of this completion")
        self.num_tokens += 1
        text = ""
        if sampled.token in self.stop_tokens:
            self.finish_reason = FinishReason.STOP
        else:
            text, self._stopped = self._scanner.push(self._detokenizer.push([sampled.token]))
            if self._stopped:
                self.finish_reason = FinishReason.STOP
        self._end_at_limit()
        return Piece(sampled.token, text, self._with_text(sampled.logprob))

    def rest(self) -> str:
        """The end of the text: what was held back, now that nothing more comes. Once."""
        if self._stopped:
            return ""
        text, self._stopped = self._scanner.push(self._detokenizer.flush())
        return text if self._stopped else text + self._scanner.flush()

    def _end_at_limit(self) -> None:
        if self.finish_reason is None and self.num_tokens >= self._max_tokens:
            self.finish_reason = FinishReason.LENGTH

    def _with_text(self, logprob: TokenLogprob | None) -> TokenLogprob | None:
        if logprob is None:
            return None
        return TokenLogprob(
            token=logprob.token,
            text=self._codec.token_text(logprob.token),
            logprob=logprob.logprob,
            top=tuple(
                TopLogprob(token=top.token, text=self._codec.token_text(top.token), logprob=top.logprob)
                for top in logprob.top
            ),
        )
