"""Chunk key → number, for chunks that follow one another in prompts. Pure.

Memory is what a lookup waits for: each key of a prompt has a place of its own in a table of many megabytes. So chunks
that follow one another are kept in runs, and only the first chunk of a run has to be looked up:

    prompt  k0 k1 k2 k3 k4 k5 …      k0 ──→ run 7 (k0 k1 k2)      compared with the prompt as they lie
                                     k3 ──→ run 9 (k3 k4 x5)      k4 too; k5 is another, and is looked up
                                     k5 ──→ alone

A run grows as children of its last chunk are registered, or as prompts show which chunk follows which. It splits
where a chunk is removed. Keys are compared in all 32 bytes everywhere.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

from halfmoon.schemas.ids import ChunkKey

T = TypeVar("T")

_LONGEST: Final = 64
"""Chunks in a run: what it costs to find one in the middle, or to split it there."""


class ChunkRuns:
    """A mapping. Neither its dicts nor its tuples hold anything that the garbage collector has to follow."""

    def __init__(self) -> None:
        self._alone: dict[ChunkKey, int] = {}
        """Chunks of which no neighbour is known."""
        self._run_of: dict[ChunkKey, int] = {}
        self._keys: list[tuple[ChunkKey, ...]] = []
        self._numbers: list[array[int]] = []
        """By run, as its keys."""
        self._unused: list[int] = []

    def __len__(self) -> int:
        return len(self._alone) + len(self._run_of)

    def __iter__(self) -> Iterator[ChunkKey]:
        yield from self._alone
        yield from self._run_of

    def get(self, key: ChunkKey, default: T) -> int | T:
        run = self._run_of.get(key)
        return self._alone.get(key, default) if run is None else self._numbers[run][self._keys[run].index(key)]

    def put(self, key: ChunkKey, number: int, parent: ChunkKey | None) -> None:
        """`parent`: the chunk before it, where that is known. It matters to speed only."""
        run = self._run_of.get(key)
        if run is not None:
            self._numbers[run][self._keys[run].index(key)] = number
        elif key in self._alone or parent is None or not self._append(parent, key, number):
            self._alone[key] = number

    def remove(self, key: ChunkKey) -> None:
        """Raises KeyError where it isn't there."""
        run = self._run_of.pop(key, None)
        if run is None:
            del self._alone[key]
            return
        keys, numbers = self._keys[run], self._numbers[run]
        at = keys.index(key)
        self._store(run, keys[:at], numbers[:at])
        if at + 1 < len(keys):
            self._store(self._new(), keys[at + 1 :], numbers[at + 1 :])

    def along(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Numbers of a prompt's chunks, up to the first that isn't there."""
        prompt = tuple(keys)
        found: list[int] = []
        while len(found) < len(prompt):
            at = len(found)
            key = prompt[at]
            run = self._run_of.get(key)
            if run is not None:
                if at:
                    run = self._joined(self._run_of.get(prompt[at - 1]), run, prompt[at - 1], key)
                stored, numbers = self._keys[run], self._numbers[run]
                if stored[0] != key:
                    begin = stored.index(key)
                    stored, numbers = stored[begin:], numbers[begin:]
                found += numbers[: _num_equal(stored, prompt[at : at + len(stored)])]
                continue
            number = self._alone.get(key)
            if number is None:
                break
            if at and self._append(prompt[at - 1], key, number):
                del self._alone[key]
            found.append(number)
        return found

    def _append(self, parent: ChunkKey, key: ChunkKey, number: int) -> bool:
        """Let `key`, which is in no run, follow `parent`; whether a run ends there that can take it."""
        run = self._run_of.get(parent)
        if run is None:
            if parent == key or parent not in self._alone:
                return False
            run = self._new()
            self._keys[run], self._numbers[run] = (parent,), array("I", [self._alone.pop(parent)])
            self._run_of[parent] = run
        keys = self._keys[run]
        if keys[-1] != parent or len(keys) == _LONGEST:
            return False
        self._keys[run] = (*keys, key)
        self._numbers[run] += array("I", [number])  # `append` would keep room for more
        self._run_of[key] = run
        return True

    def _joined(self, before: int | None, run: int, parent: ChunkKey, key: ChunkKey) -> int:
        """Let a run that begins with `key` follow one that ends with `parent`, where both fit into one; the run that
        `key` is in then."""
        if before is None or before == run:
            return run
        keys = self._keys[before] + self._keys[run]
        if len(keys) > _LONGEST or self._keys[before][-1] != parent or self._keys[run][0] != key:
            return run
        numbers = self._numbers[before] + self._numbers[run]
        self._free(run)
        self._store(before, keys, numbers)
        return before

    def _store(self, run: int, keys: tuple[ChunkKey, ...], numbers: "array[int]") -> None:
        """What is left of a run, under the same or a new name; one chunk is none."""
        if len(keys) > 1:
            self._keys[run], self._numbers[run] = keys, numbers
            self._run_of.update(dict.fromkeys(keys, run))
            return
        for key, number in zip(keys, numbers, strict=True):
            del self._run_of[key]
            self._alone[key] = number
        self._free(run)

    def _free(self, run: int) -> None:
        self._keys[run], self._numbers[run] = (), array("I")
        self._unused.append(run)

    def _new(self) -> int:
        if self._unused:
            return self._unused.pop()
        self._keys.append(())
        self._numbers.append(array("I"))
        return len(self._keys) - 1


def _num_equal(stored: tuple[ChunkKey, ...], asked: tuple[ChunkKey, ...]) -> int:
    """How many of the first keys are the same."""
    if stored[: len(asked)] == asked:
        return len(asked)
    return next(count for count, (ours, theirs) in enumerate(zip(stored, asked, strict=False)) if ours != theirs)
