"""Token events as they arrive, made into a completion without repeats and without gaps. Pure.

A request may be handed from one decode worker to another. The second begins a little before the place where the first
was lost, so what arrives overlaps; since the text that a token adds depends on the tokens before it alone, the overlap
can be cut off exactly.

    first worker     0 1 2 3 4 5
    second worker            4 5 6 7      4 and 5 are a repeat: dropped, or cut off where they came with 6
    lost                               9  8 never arrived: an error, not a shorter text
"""

from halfmoon.schemas.requests import Finished, Tokens


class TokensLost(Exception):
    """A part of the completion never arrived."""

    def __init__(self, expected_seq: int, found_seq: int) -> None:
        super().__init__(f"tokens {expected_seq} to {found_seq - 1} of the completion never arrived; send it again")
        self.expected_seq = expected_seq
        self.found_seq = found_seq


class Sequence:
    """What one request's reader has got so far."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._num_chars = 0
        self._chars_before: dict[int, int] = {0: 0}
        """Length of the text before a token, for those with which an event began."""

    def accept(self, tokens: Tokens) -> Tokens | None:
        """What is new in the event; None where nothing is. Raises `TokensLost`."""
        seq, end = tokens.seq, tokens.seq + len(tokens.tokens)
        if seq > self.num_tokens:
            raise TokensLost(self.num_tokens, seq)
        if seq < self.num_tokens:
            if end <= self.num_tokens:
                return None
            tokens = self._without_repeats(tokens)
        self._num_chars += len(tokens.text)
        self.num_tokens = end
        self._chars_before[end] = self._num_chars
        return tokens

    def finish(self, finished: Finished) -> Finished:
        """Raises `TokensLost` where the end speaks of more tokens than came."""
        if finished.seq > self.num_tokens:
            raise TokensLost(self.num_tokens, finished.seq)
        return finished

    def _without_repeats(self, tokens: Tokens) -> Tokens:
        num_known = self.num_tokens - tokens.seq
        chars_before = self._chars_before.get(tokens.seq)
        if chars_before is None:
            # It begins in the middle of an earlier event: how much of its text is known can't be told.
            raise TokensLost(self.num_tokens, tokens.seq + len(tokens.tokens))
        return Tokens(
            request_id=tokens.request_id,
            seq=self.num_tokens,
            tokens=tokens.tokens[num_known:],
            text=tokens.text[self._num_chars - chars_before :],
            logprobs=tokens.logprobs[num_known:] if tokens.logprobs is not None else None,
        )
