"""Repeats are cut off exactly, losses are errors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.client.sequence import Sequence, TokensLost
from halfmoon.schemas.ids import RequestId
from halfmoon.schemas.requests import Finished, FinishReason, TokenLogprob, Tokens, Usage

ID = RequestId("r")
TEXTS = ["The", " moon", "", "", " 😀", " ris", "", "es", ".", "\n"]
"""What each token adds to the text: some nothing, while a character isn't whole."""


def _event(seq: int, stop: int) -> Tokens:
    return Tokens(
        request_id=ID,
        seq=seq,
        tokens=tuple(range(seq, stop)),
        text="".join(TEXTS[seq:stop]),
        logprobs=tuple(TokenLogprob(token=at, text="", logprob=-1.0) for at in range(seq, stop)),
    )


def _finished(seq: int) -> Finished:
    usage = Usage(prompt_tokens=1, completion_tokens=seq)
    return Finished(request_id=ID, seq=seq, text="", finish_reason=FinishReason.STOP, usage=usage)


@given(st.lists(st.integers(0, len(TEXTS) - 1), max_size=6), st.data())
def test_handed_over_any_number_of_times_it_reads_the_same(hand_overs: list[int], data: st.DataObject) -> None:
    """Each worker begins at or before the place where the one before it was lost, with one or more tokens at a time."""
    sequence = Sequence()
    tokens: list[int] = []
    text, logprobs = "", 0
    for lost_at in [*hand_overs, len(TEXTS)]:
        at = data.draw(st.integers(0, sequence.num_tokens).filter(lambda seq: seq in sequence._chars_before))
        while at < lost_at:
            stop = min(lost_at, at + data.draw(st.integers(1, 3)))
            try:
                event = sequence.accept(_event(at, stop))
            except TokensLost:
                # Only where it begins inside an earlier event.
                assert at not in sequence._chars_before
                return
            if event is not None:
                assert event.seq == len(tokens)
                tokens += event.tokens
                text += event.text
                logprobs += len(event.logprobs or ())
            at = stop
    assert tokens == list(range(len(TEXTS)))
    assert text == "".join(TEXTS)
    assert logprobs == len(TEXTS)
    assert sequence.finish(_finished(len(TEXTS))).seq == len(TEXTS)


def test_a_gap_is_an_error() -> None:
    sequence = Sequence()
    sequence.accept(_event(0, 2))
    with pytest.raises(TokensLost, match="tokens 2 to 4 of the completion never arrived"):
        sequence.accept(_event(5, 6))
    with pytest.raises(TokensLost, match="tokens 2 to 2"):
        sequence.finish(_finished(3))
    assert sequence.num_tokens == 2


def test_a_repeat_is_nothing() -> None:
    sequence = Sequence()
    sequence.accept(_event(0, 3))
    assert sequence.accept(_event(0, 1)) is None
    assert sequence.accept(_event(1, 3)) is None
