"""Runs of chunks against a plain dict: whatever is put, removed and looked up, and in whatever order."""

import hashlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from halfmoon.scheduling.runs import ChunkRuns
from halfmoon.schemas.ids import ChunkKey


def child_of(parent: ChunkKey | None, name: int) -> ChunkKey:
    return ChunkKey(hashlib.sha256((parent or b"") + bytes([name])).digest())


def prompt_of(names: list[int]) -> list[ChunkKey]:
    keys: list[ChunkKey] = []
    for name in names:
        keys.append(child_of(keys[-1] if keys else None, name))
    return keys


# Mostly the same chunks: prompts share long prefixes, and part ways anywhere. Some are longer than a run may be.
prompts = st.tuples(st.sampled_from([3, 12, 70]), st.lists(st.booleans(), max_size=5)).map(
    lambda drawn: prompt_of([0] * drawn[0] + list(map(int, drawn[1])))
)
numbers = st.integers(1, 9)


class Runs(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runs = ChunkRuns()
        self.plain: dict[ChunkKey, int] = {}

    @rule(prompt=prompts, number=numbers, begin=st.integers(0, 70), is_told=st.booleans(), is_backwards=st.booleans())
    def register(self, prompt: list[ChunkKey], number: int, begin: int, is_told: bool, is_backwards: bool) -> None:
        """The later chunks of a prompt, first to last or the other way round, as a snapshot may have them."""
        positions = range(min(begin, len(prompt)), len(prompt))
        for at in reversed(positions) if is_backwards else positions:
            parent = prompt[at - 1] if at and is_told else None
            self._tell(prompt[at], number, parent)

    @rule(prompt=prompts, parent=prompts, number=numbers)
    def register_falsely(self, prompt: list[ChunkKey], parent: list[ChunkKey], number: int) -> None:
        """A node that names a wrong parent costs time only."""
        self._tell(prompt[-1], number, parent[-1])

    def _tell(self, key: ChunkKey, number: int, parent: ChunkKey | None) -> None:
        if key in self.plain:
            self.runs.put(key, number)
        else:
            self.runs.add(key, number, parent)
        self.plain[key] = number

    @precondition(lambda self: self.plain)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.plain)))
        self.runs.remove(key)
        del self.plain[key]

    @rule(prompt=prompts)
    def look_up(self, prompt: list[ChunkKey]) -> None:
        asked = [ChunkKey(bytes(bytearray(key))) for key in prompt]  # equal, not the same objects
        expected = []
        for key in prompt:
            if key not in self.plain:
                break
            expected.append(self.plain[key])
        assert self.runs.along(asked) == expected

    @invariant()
    def is_the_same(self) -> None:
        assert len(self.runs) == len(self.plain)
        assert {key: self.runs.get(key, None) for key in self.runs} == self.plain


Runs.TestCase.settings = settings(max_examples=40, stateful_step_count=20)
TestRuns = Runs.TestCase


def test_keys_that_differ_in_their_last_byte_are_different() -> None:
    runs = ChunkRuns()
    first, second = prompt_of([0, 0])
    runs.add(first, 1, None)
    runs.add(second, 2, first)
    twin = ChunkKey(second[:-1] + bytes([second[-1] ^ 1]))
    assert runs.along([first, twin]) == [1]
    assert runs.along([first, second, twin]) == [1, 2]
    assert runs.get(twin, None) is None
