"""Pieces of decoded text, joined, are the decoded whole; and nothing unfinished is ever shown."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.text import TextCodec
from halfmoon.text.detokenizer import REPLACEMENT, Detokenizer
from support import tiny_tokenizer


@pytest.fixture(scope="module")
def level(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec.load(tiny_tokenizer.byte_level(tmp_path_factory.mktemp("level")))


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec.load(tiny_tokenizer.byte_fallback(tmp_path_factory.mktemp("fallback")))


scripts = st.text(
    st.one_of(
        st.sampled_from("abc xyz.,\n"),
        st.sampled_from("😀🏳️‍🌈👩‍👩‍👧नमस्तेעבריתไทยяßé中文한국"),
        st.characters(codec="utf-8", exclude_characters=REPLACEMENT),
    ),
    max_size=40,
)


def _in_pieces(detokenizer: Detokenizer, tokens: list[int], sizes: list[int]) -> list[str]:
    pieces, at = [], 0
    for size in [*sizes, *([1] * len(tokens))]:
        pieces.append(detokenizer.push(tokens[at : at + size]))
        at += size
    pieces.append(detokenizer.flush())
    return pieces


@given(text=scripts, sizes=st.lists(st.integers(0, 5), max_size=20))
def test_byte_level_text_comes_out_whole(level: TextCodec, text: str, sizes: list[int]) -> None:
    pieces = _in_pieces(level.detokenizer(), level.encode(text), sizes)
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


@given(text=scripts, sizes=st.lists(st.integers(0, 5), max_size=20))
def test_byte_fallback_text_comes_out_whole(fallback: TextCodec, text: str, sizes: list[int]) -> None:
    tokens = fallback.encode(text)
    assert "".join(_in_pieces(fallback.detokenizer(), tokens, sizes)) == fallback.decode(tokens)


@given(
    prompt=st.lists(st.integers(0, 299), max_size=12),
    tokens=st.lists(st.integers(0, 299), max_size=80),
    sizes=st.lists(st.integers(0, 9), max_size=20),
)
@settings(deadline=None)
def test_any_tokens_at_all_after_any_prompt(
    level: TextCodec, prompt: list[int], tokens: list[int], sizes: list[int]
) -> None:
    joined = "".join(_in_pieces(level.detokenizer(prompt), tokens, sizes))
    assert level.decode([*prompt, *tokens]).endswith(joined)
    assert joined.endswith(level.decode(tokens).lstrip(REPLACEMENT))
    assert "".join(_in_pieces(level.detokenizer(), tokens, sizes)) == level.decode(tokens)


@given(text=scripts, cut=st.integers(0, 40), sizes=st.lists(st.integers(0, 9), max_size=20))
def test_byte_fallback_after_a_prompt(fallback: TextCodec, text: str, cut: int, sizes: list[int]) -> None:
    prompt, both = fallback.encode(text[:cut]), fallback.encode(text)
    joined = "".join(_in_pieces(fallback.detokenizer(prompt), both[len(prompt) :], sizes))
    assert fallback.decode(prompt) + joined == fallback.decode(both)


@given(text=scripts, cut=st.integers(0, 200))
def test_prompt_and_completion_are_the_text(level: TextCodec, text: str, cut: int) -> None:
    """Also where the prompt ends in the middle of a character: the completion has all of that character."""
    tokens = level.encode(text)
    prompt, completion = tokens[:cut], tokens[cut:]
    joined = "".join(_in_pieces(level.detokenizer(prompt), completion, []))
    before = level.decode(prompt).rstrip(REPLACEMENT)
    assert before + joined == text or not completion


def test_an_emoji_over_several_tokens_is_held_back_until_whole(level: TextCodec) -> None:
    tokens = level.encode("😀")
    assert len(tokens) == 4
    detokenizer = level.detokenizer()
    assert [detokenizer.push([token]) for token in tokens] == ["", "", "", "😀"]
    assert detokenizer.flush() == ""


def test_a_blank_after_the_prompt_is_kept(fallback: TextCodec) -> None:
    """The decoder drops the first blank of a text: a completion isn't one, it follows its prompt."""
    prompt, both = fallback.encode("a"), fallback.encode("a b")
    completion = both[len(prompt) :]
    detokenizer = fallback.detokenizer(prompt)
    assert "".join([detokenizer.push([token]) for token in completion]) == " b"


def test_a_character_that_never_ends_shows_when_flushed(level: TextCodec) -> None:
    detokenizer = level.detokenizer()
    assert detokenizer.push(level.encode("x😀")[:-1]) == "x"
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""


def test_special_tokens_add_nothing(level: TextCodec) -> None:
    (end,) = level.eos_tokens
    detokenizer = level.detokenizer()
    assert detokenizer.push([*level.encode("hi"), end]) == "hi"
    assert [detokenizer.push([end]) for _ in range(3)] == ["", "", ""]
    assert detokenizer.push(level.encode(" there")) == " there"


def test_garbage_costs_a_bounded_window(level: TextCodec) -> None:
    """A model that writes the same broken byte for ever: what is decoded for each token stays short."""
    (broken,) = [token for token in range(level.vocab_size) if level.token_bytes(token) == b"\x80"]
    longest = 0

    def decode(tokens: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return level.decode(tokens)

    detokenizer = Detokenizer(decode)
    joined = "".join([detokenizer.push([broken]) for _ in range(500)]) + detokenizer.flush()
    assert joined == REPLACEMENT * 500
    assert longest < 64
