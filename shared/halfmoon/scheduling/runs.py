"""Chunk key → number, for chunks that follow one another in prompts. Pure.

Memory is what a lookup waits for: each key of a prompt has a place of its own in a table of many megabytes. So chunks
that follow one another are kept in runs, and only the first chunk of a run has to be looked up:

    prompt  k0 k1 k2 k3 k4 k5 …      k0 ──→ run 7 (k0 k1 k2)      compared with the prompt as they lie
                                     k3 ──→ run 9 (k3 k4 x5)      k4 too; k5 is another, and is looked up
                                     k5 ──→ alone

A run's keys lie one after the other in one `bytes`, so that they are compared at the speed at which memory is read. A
run is found by 60 bits of Python's hash of a key, whose seed nobody outside knows; all 32 bytes of the key are compared
there, and a chunk that has these bits in common with another one's stays alone.

A run grows as children of its last chunk are registered, or as prompts show which chunk follows which. It splits where
a chunk is removed.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

from halfmoon.schemas.ids import ChunkKey

T = TypeVar("T")

_LONGEST: Final = 64
"""Chunks in a run: what it costs to find one in the middle, or to split it there."""
_SPARE_BITS: Final = 4
"""Of a hash: an int of 60 bits takes 32 bytes, one of 64 takes 48."""


class ChunkRuns:
    """A mapping. Neither its dicts nor its lists hold anything that the garbage collector has to follow."""

    def __init__(self) -> None:
        self._alone: dict[ChunkKey, int] = {}
        """Chunks of which no neighbour is known."""
        self._run_of: dict[int, int] = {}
        """By some bits of the key."""
        self._begins: dict[int, int] = {}
        """The same of each run's first chunk: where a prompt mostly enters a run, in a table that a cache can hold."""
        self._keys: list[bytes] = []
        self._numbers: list[int | array[int]] = []
        """By run, as its keys; one for all where they have the same."""
        self._unused: list[int] = []
        self._key_bytes = 0
        """Length of keys: that of the first to be in a run. Those of another stay alone."""

    def __len__(self) -> int:
        return len(self._alone) + len(self._run_of)

    def __iter__(self) -> Iterator[ChunkKey]:
        yield from self._alone
        for keys in self._keys:
            yield from self.cut(keys)

    def stretches(self) -> list[bytes]:
        """All keys, some of them one after the other: to be `cut`. As they lie here, so this takes little memory."""
        return [*self._alone, *filter(None, self._keys)]

    def cut(self, keys: bytes) -> list[ChunkKey]:
        """Keys that lie one after the other."""
        size = self._key_bytes or len(keys)
        return [ChunkKey(keys[begin : begin + size]) for begin in range(0, len(keys), size)]

    def get(self, key: ChunkKey, default: T) -> int | T:
        run, at = self._find(key)
        if run is None:
            return self._alone.get(key, default)
        numbers = self._numbers[run]
        return numbers if isinstance(numbers, int) else numbers[at]

    def add(self, key: ChunkKey, number: int, parent: ChunkKey | None) -> None:
        """A chunk that isn't there yet. `parent`: the one before it, where that is known; it matters to speed only."""
        if parent is None or not self._append(parent, key, number):
            self._alone[key] = number

    def put(self, key: ChunkKey, number: int) -> None:
        """Another number for a chunk that is there."""
        run, at = self._find(key)
        if run is None:
            self._alone[key] = number
        elif self._numbers[run] != number:
            numbers = self._unfolded(run)
            numbers[at] = number
            self._numbers[run] = _folded(numbers)

    def remove(self, key: ChunkKey) -> None:
        """Raises KeyError where it isn't there."""
        run, at = self._find(key)
        if run is None:
            del self._alone[key]
            return
        keys, numbers = self._keys[run], self._unfolded(run)
        size = self._key_bytes
        del self._run_of[_bits(key)]
        if not at:
            self._shorten(run, keys[size:], numbers[1:])
            return
        self._shorten(run, keys[: at * size], numbers[:at])
        if at + 1 < len(numbers):
            self._store(self._new(), keys[(at + 1) * size :], numbers[at + 1 :])

    def along(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Numbers of a prompt's chunks, up to the first that isn't there."""
        prompt = b"".join(keys)
        found: list[int] = []
        while len(found) < len(keys):
            at = len(found)
            key = keys[at]
            run, begin = self._begins.get(_bits(key)), 0
            if run is None or not self._keys[run].startswith(key):
                run, begin = self._find(key)
            if run is not None:
                if at and begin == 0:
                    run, begin = self._joined(keys[at - 1], run, key)
                count = _num_equal(self._keys[run], begin, prompt, at, self._key_bytes)
                numbers = self._numbers[run]
                found += [numbers] * count if isinstance(numbers, int) else numbers[begin : begin + count]
                continue
            number = self._alone.get(key)
            if number is None:
                break
            if at and self._append(keys[at - 1], key, number):
                del self._alone[key]
            found.append(number)
        return found

    def _find(self, key: ChunkKey) -> tuple[int | None, int]:
        """The run that a chunk is in, and its place there; None where it is alone, or unknown."""
        run = self._run_of.get(_bits(key))
        if run is None:
            return None, 0
        keys = self._keys[run]
        begin = keys.find(key)
        while begin % self._key_bytes and begin >= 0:
            begin = keys.find(key, begin + 1)
        return (run, begin // self._key_bytes) if begin >= 0 else (None, 0)

    def _append(self, parent: ChunkKey, key: ChunkKey, number: int) -> bool:
        """Let `key`, which is in no run, follow `parent`; whether a run ends there that can take it."""
        bits = _bits(key)
        self._key_bytes = self._key_bytes or len(key)
        if bits in self._run_of or not len(parent) == len(key) == self._key_bytes:
            return False
        run = self._run_of.get(_bits(parent))
        if run is None:
            run = self._begin(parent, bits)
            if run is None:
                return False
        keys = self._keys[run]
        if not keys.endswith(parent) or len(keys) == _LONGEST * self._key_bytes:
            return False
        if self._numbers[run] != number:
            self._numbers[run] = self._unfolded(run) + array("I", [number])
        self._keys[run] = keys + key
        self._run_of[bits] = run
        return True

    def _begin(self, parent: ChunkKey, child_bits: int) -> int | None:
        """A run of one chunk that was alone, for another to follow; None where it can't begin one."""
        bits = _bits(parent)
        if parent not in self._alone or bits == child_bits:
            return None
        run = self._new()
        self._set(run, parent, array("I", [self._alone.pop(parent)]))
        self._run_of[bits] = run
        return run

    def _joined(self, parent: ChunkKey, run: int, key: ChunkKey) -> tuple[int, int]:
        """Let a run that begins with `key` follow one that ends with `parent`, where both fit into one; where `key` is
        then."""
        before = self._run_of.get(_bits(parent))
        if before is None or before == run:
            return run, 0
        keys = self._keys[before] + self._keys[run]
        if len(keys) > _LONGEST * self._key_bytes or not self._keys[before].endswith(parent):
            return run, 0
        begin = len(self._keys[before]) // self._key_bytes
        numbers = self._unfolded(before) + self._unfolded(run)
        self._free(run)
        self._store(before, keys, numbers)
        return before, begin

    def _store(self, run: int, keys: bytes, numbers: "array[int]") -> None:
        """Keys under another run's name than before."""
        self._shorten(run, keys, numbers)
        if len(numbers) > 1:
            self._run_of.update(dict.fromkeys(map(_bits, self.cut(keys)), run))

    def _shorten(self, run: int, keys: bytes, numbers: "array[int]") -> None:
        """What is left of a run; one chunk is none."""
        if len(numbers) > 1:
            self._set(run, keys, numbers)
            return
        del self._run_of[_bits(keys)]
        self._alone[ChunkKey(keys)] = numbers[0]
        self._free(run)

    def _free(self, run: int) -> None:
        self._set(run, b"", array("I"))
        self._unused.append(run)

    def _set(self, run: int, keys: bytes, numbers: "array[int]") -> None:
        before = self._keys[run]
        if before:
            del self._begins[_bits(before[: self._key_bytes])]
        self._keys[run], self._numbers[run] = keys, _folded(numbers)
        if keys:
            self._begins[_bits(keys[: self._key_bytes])] = run

    def _unfolded(self, run: int) -> "array[int]":
        numbers = self._numbers[run]
        return (
            array("I", [numbers]) * (len(self._keys[run]) // self._key_bytes) if isinstance(numbers, int) else numbers
        )

    def _new(self) -> int:
        if self._unused:
            return self._unused.pop()
        self._keys.append(b"")
        self._numbers.append(0)
        return len(self._keys) - 1


def _folded(numbers: "array[int]") -> "int | array[int]":
    if not numbers or numbers[0] != numbers[-1] or numbers.count(numbers[0]) < len(numbers):
        return numbers
    return numbers[0]


def _bits(key: bytes) -> int:
    return hash(key) >> _SPARE_BITS


def _num_equal(stored: bytes, begin: int, prompt: bytes, at: int, size: int) -> int:
    """How many keys are the same from the places `begin` and `at` on, of which the first are; `size`: bytes of each."""
    ours, theirs = stored[begin * size :], prompt[at * size :]
    if theirs.startswith(ours):
        return len(ours) // size
    equal, other = 1, min(len(ours), len(theirs)) // size + 1
    while other - equal > 1:
        middle = (equal + other) // 2
        if ours[: middle * size] == theirs[: middle * size]:
            equal = middle
        else:
            other = middle
    return equal
