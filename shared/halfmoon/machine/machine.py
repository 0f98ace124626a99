"""The interpreter for transition tables.

A table maps (state, event) to the next state, and that is all there is to know about a life cycle: what isn't in the
table is illegal. Tables hold no code, so they can be drawn, tested exhaustively, and read on one screen.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)

Table = Mapping[tuple[S, E], S]


class IllegalTransition(Exception):
    """An event that the table doesn't allow in this state. The state is unchanged."""

    def __init__(self, state: Enum, event: Enum) -> None:
        super().__init__(f"{event.name} is not allowed in state {state.name}")
        self.state = state
        self.event = event


class Machine(Generic[S, E]):
    """One thing's place in its life cycle."""

    __slots__ = ("_state", "_table")

    def __init__(self, table: Table[S, E], initial: S) -> None:
        self._table = table
        self._state = initial

    @property
    def state(self) -> S:
        return self._state

    def can(self, event: E) -> bool:
        return (self._state, event) in self._table

    def fire(self, event: E) -> S:
        """Move on, and return the new state. Raises `IllegalTransition`, which leaves the state as it was."""
        following = self._table.get((self._state, event))
        if following is None:
            raise IllegalTransition(self._state, event)
        self._state = following
        return following


def diagram(table: Table[S, E], initial: S) -> str:
    """The table as a Mermaid state diagram; the docs are generated from it."""
    lines = ["stateDiagram-v2", f"    [*] --> {initial.value}"]
    lines += [f"    {state.value} --> {following.value}: {event.value}" for (state, event), following in table.items()]
    leaving = {state for state, _ in table}
    final = [following for following in dict.fromkeys(table.values()) if following not in leaving]
    lines += [f"    {state.value} --> [*]" for state in final]
    return "\n".join(lines)
