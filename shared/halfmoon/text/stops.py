"""Stop strings: text ends before the first of them, also where it arrives in pieces."""

from collections.abc import Sequence


class StopScanner:
    """Passes text on, except what is, or may yet become, a stop string.

    `push` until it says stopped (nothing more comes out then), or `flush` at the end of the text. What has come out,
    joined, is the text up to the first stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """What can be shown now, and whether a stop string was reached: the one that is complete first.

        That, and not how the text is cut into pieces, decides: character by character gives the same.
        """
        if self._stopped:
            return "", True
        if not self._stops:
            return text, False
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, start = min(found)
            emit, self._held, self._stopped = self._held[:start], "", True
            return emit, True
        open_at = self._first_open_start()
        emit, self._held = self._held[:open_at], self._held[open_at:]
        return emit, False

    def flush(self) -> str:
        """What was held back and is no stop string after all: the text has ended."""
        held, self._held = self._held, ""
        return held

    def _first_open_start(self) -> int:
        """Where the first suffix begins that is the beginning of some stop string; the length where there is none."""
        held = self._held
        longest = max(len(stop) for stop in self._stops)
        for start in range(max(0, len(held) - longest + 1), len(held)):
            if any(stop.startswith(held[start:]) for stop in self._stops):
                return start
        return len(held)
