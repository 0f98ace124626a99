"""Tokens to text, a few at a time, so that the pieces joined are the text of the whole."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no UTF-8: at the end of a text, perhaps a character that isn't whole yet."""

_CONTEXT_SIZES = (6, 7, 8, 9, 5, 4, 3, 2, 1)
"""Tokens of the prompt to take as context: six will do, unless they begin inside a character of up to four tokens."""

_UNSOUND_CONTEXT_SIZE = 3
"""For a prompt that is nothing but the beginning of a character, or garbage."""

_MAX_HELD_TOKENS = 48
"""No character is this long: what is held back then is garbage, and comes out as it is."""


class Detokenizer:
    """Turns one completion's tokens into text.

    How a token reads can depend on those before it (a blank, mostly), so each is decoded with a few of them:

        … prompt and earlier text | context | held |
                                    base ──╯    ╰── shown: what came out of it already

    The context is out whole, as `base`. `held` grows until it ends with a whole character; then it becomes the context.
    Tokens go through one at a time, so how they are cut into pushes changes nothing.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt_tokens: Sequence[int] = ()) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._base = ""
        self._held: list[int] = []
        self._shown = ""
        contexts = {size: decode(list(prompt_tokens[-size:])) for size in _CONTEXT_SIZES if prompt_tokens}
        # A prompt of token ids may end inside a character; that belongs to the completion, which makes it whole.
        sound = (size for size, text in contexts.items() if text and not text.startswith(REPLACEMENT))
        if prompt_tokens:
            size = next(sound, _UNSOUND_CONTEXT_SIZE)
            self._context, self._base = list(prompt_tokens[-size:]), contexts[size].rstrip(REPLACEMENT)

    def push(self, tokens: Sequence[int]) -> str:
        """What these tokens add to the text, without a last character that isn't whole."""
        return "".join([self._push_one(token) for token in tokens])

    def flush(self) -> str:
        """What was held back: the completion has ended, so a character that isn't whole stays U+FFFD."""
        if not self._held:
            return ""
        added = self._fresh().removeprefix(self._shown)
        self._context, self._base, self._held, self._shown = [], "", [], ""
        return added

    def _push_one(self, token: int) -> str:
        self._held.append(token)
        fresh = self._fresh()
        settled = fresh.rstrip(REPLACEMENT)
        if settled == fresh:
            added = fresh.removeprefix(self._shown)
            self._advance(fresh)
            return added
        if len(self._held) > _MAX_HELD_TOKENS:
            return self.flush()
        added = settled.removeprefix(self._shown)
        self._shown = settled
        return added

    def _fresh(self) -> str:
        """The text of what is held, in its context."""
        text = self._decode(self._context + self._held)
        if text.startswith(self._base):
            return text[len(self._base) :]
        # Byte-fallback decoders void a whole run of byte tokens for one broken byte, also those that were sound before.
        return self._decode(self._held)

    def _advance(self, fresh: str) -> None:
        """All is out: the shortest tail that has a text by itself is the next context."""
        if fresh:
            window = self._context + self._held
            for size in range(len(self._held), len(window) + 1):
                if base := self._decode(window[-size:]):
                    self._context, self._base = window[-size:], base
                    break
        self._held, self._shown = [], ""
