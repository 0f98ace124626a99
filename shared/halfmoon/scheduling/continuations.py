"""What is likely to follow a prefix: how often each chunk came after it in the prompts seen. Pure."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from halfmoon.schemas.ids import ChunkKey

MAX_PREFIXES: Final = 65_536
"""About 40 MB. Beyond it, those that were seen longest ago are forgotten."""
_MAX_CHILDREN: Final = 8
"""Per prefix: more than one in so many can't be likely."""
_RECENT: Final = 256
"""Prompts that a prefix is judged by: beyond, all counts are halved."""


@dataclass(slots=True)
class _Seen:
    num_prompts: int = 0
    """That had this prefix, whatever came after it, also nothing."""
    children: dict[ChunkKey, int] = field(default_factory=dict)


class Continuations:
    """P(next chunk | prefix), estimated as n / (N + 1): of N prompts with the prefix n went on like that.

    The 1 keeps it below what few prompts seem to say: above 0.9 takes nine alike.
    """

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._seen: OrderedDict[ChunkKey, _Seen] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def see(self, keys: Sequence[ChunkKey]) -> None:
        """A prompt's whole chunks, from the first on."""
        for at in range(len(keys) - 1, -1, -1):
            seen = self._seen.setdefault(keys[at], _Seen())
            self._seen.move_to_end(keys[at])
            seen.num_prompts += 1
            if at + 1 < len(keys):
                _count(seen.children, keys[at + 1])
            if seen.num_prompts > _RECENT:
                seen.num_prompts //= 2
                seen.children = {key: count // 2 for key, count in seen.children.items() if count > 1}
        while len(self._seen) > self._max_prefixes:
            self._seen.popitem(last=False)

    def likely(self, prefix: ChunkKey, confidence: float, max_chunks: int) -> list[ChunkKey]:
        """The chunks that most likely follow one another after `prefix`, as long as all of them together are at least
        this likely."""
        likely: list[ChunkKey] = []
        probability = 1.0
        seen = self._seen.get(prefix)
        while seen is not None and seen.children and len(likely) < max_chunks:
            child = max(seen.children, key=seen.children.__getitem__)
            probability *= seen.children[child] / (seen.num_prompts + 1)
            if probability < confidence:
                break
            likely.append(child)
            seen = self._seen.get(child)
        return likely


def _count(children: dict[ChunkKey, int], key: ChunkKey) -> None:
    """Frequent items in bounded room (Misra and Gries, 1982): what is crowded out was rare."""
    if key in children or len(children) < _MAX_CHILDREN:
        children[key] = children.get(key, 0) + 1
        return
    for each in list(children):
        children[each] -= 1
        if not children[each]:
            del children[each]
