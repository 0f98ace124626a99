"""Tokens to text, a few at a time, so that the pieces joined are the text of the whole."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no UTF-8: at the end of a text, perhaps a character that isn't whole yet."""

_MAX_UNFINISHED = 3
"""Bytes of a UTF-8 character but its last."""

_CONTEXT_TOKENS = 6
"""Tokens of the prompt that decide how a completion's first token reads (a leading blank, mostly)."""

_MAX_WINDOW_TOKENS = 48
"""Beyond this the window is cut even where no character ends, so that a model that writes garbage costs linear time."""


class Detokenizer:
    """Turns one completion's tokens into text.

    Each push decodes a short window of the last tokens, not all of them:

        … prompt and earlier text | context | new tokens |
                                    ╰────── window ──────╯    emitted: characters of the window that came out already

    A character is held back until all of its tokens are there. Decoders write an unfinished one as one to three U+FFFD
    at the very end (one for all of its bytes, or one for each), so only those are in doubt.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt_tokens: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(prompt_tokens[-_CONTEXT_TOKENS:])
        self._context = len(self._window)
        """Tokens at the window's start whose text had all come out when the last of them did."""
        text = decode(self._window) if self._window else ""
        self._emitted = len(_settled(text))

    def push(self, tokens: Sequence[int]) -> str:
        """What these tokens add to the text, without a last character that may not be whole."""
        self._window.extend(tokens)
        text = self._decode(self._window)
        settled = _settled(text)
        added = settled[self._emitted :]
        self._emitted = max(self._emitted, len(settled))
        if len(settled) == len(text):
            self._advance()
        elif len(self._window) > _MAX_WINDOW_TOKENS:
            self._cut(text)
        return added

    def flush(self) -> str:
        """What was held back: the completion has ended, so a character that isn't whole stays U+FFFD."""
        text = self._decode(self._window) if self._window else ""
        added = text[self._emitted :]
        self._emitted = max(self._emitted, len(text))
        return added

    def _advance(self) -> None:
        """Everything is out: what was new becomes the context, unless it is without text (special tokens)."""
        new = self._window[self._context :]
        if text := self._decode(new):
            self._window, self._context, self._emitted = new, len(new), len(text)
        else:
            del self._window[self._context :]

    def _cut(self, text: str) -> None:
        """Drop the head of a window that doesn't end cleanly, at a place where that changes nothing."""
        for cut in range(len(self._window) - 4, 0, -1):
            tail = self._decode(self._window[cut:])
            if len(tail) <= len(text) and text == self._decode(self._window[:cut]) + tail:
                self._emitted -= len(text) - len(tail)
                del self._window[:cut]
                self._context = 0
                return


def _settled(text: str) -> str:
    """The text without what may be an unfinished character."""
    end = len(text)
    while end > max(0, len(text) - _MAX_UNFINISHED) and text[end - 1] == REPLACEMENT:
        end -= 1
    return text[:end]
