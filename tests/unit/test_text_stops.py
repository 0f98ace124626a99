"""Stop strings are found wherever the text is cut, and nothing after them comes out."""

from hypothesis import given
from hypothesis import strategies as st

from halfmoon.text import StopScanner


def _naive(text: str, stops: list[str]) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


def _in_pieces(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    scanner, out, stopped = StopScanner(stops), "", False
    for piece in pieces:
        emit, stopped = scanner.push(piece)
        out += emit
    return out + scanner.flush(), stopped


@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_equals_looking_at_each_character_in_turn(pieces: list[str], stops: list[str]) -> None:
    assert _in_pieces(pieces, stops) == _naive("".join(pieces), stops)


@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_never_shows_a_part_of_a_stop_string_too_early(pieces: list[str], stops: list[str]) -> None:
    scanner, out = StopScanner(stops), ""
    final, _ = _naive("".join(pieces), stops)
    for piece in pieces:
        out += scanner.push(piece)[0]
        assert final.startswith(out)


def test_text_without_a_stop_passes_at_once() -> None:
    assert StopScanner([]).push("anything") == ("anything", False)
    assert StopScanner(["END"]).push("anything") == ("anything", False)


def test_holds_back_no_more_than_it_must() -> None:
    scanner = StopScanner(["\n\n"])
    assert scanner.push("one\n") == ("one", False)
    assert scanner.push("two\n") == ("\ntwo", False)
    assert scanner.push("\nthree") == ("", True)
    assert scanner.push("four") == ("", True)
    assert scanner.flush() == ""
