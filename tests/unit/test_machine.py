"""The interpreter for transition tables."""

from enum import StrEnum

import pytest

from halfmoon.machine import IllegalTransition, Machine, Table, diagram


class Door(StrEnum):
    OPEN = "open"
    SHUT = "shut"
    GONE = "gone"


class Push(StrEnum):
    CLOSE = "close"
    OPEN = "open"
    BREAK = "break"


TABLE: Table[Door, Push] = {
    (Door.OPEN, Push.CLOSE): Door.SHUT,
    (Door.SHUT, Push.OPEN): Door.OPEN,
    (Door.SHUT, Push.BREAK): Door.GONE,
}


@pytest.mark.parametrize("state", Door)
@pytest.mark.parametrize("event", Push)
def test_the_table_is_all_there_is(state: Door, event: Push) -> None:
    machine = Machine(TABLE, state)
    assert machine.can(event) == ((state, event) in TABLE)
    if machine.can(event):
        assert machine.fire(event) is TABLE[state, event] is machine.state
    else:
        with pytest.raises(IllegalTransition, match=f"{event.name} is not allowed in state {state.name}"):
            machine.fire(event)
        assert machine.state is state


def test_the_diagram_shows_every_transition_and_the_ends() -> None:
    assert diagram(TABLE, Door.OPEN).splitlines() == [
        "stateDiagram-v2",
        "    [*] --> open",
        "    open --> shut: close",
        "    shut --> open: open",
        "    shut --> gone: break",
        "    gone --> [*]",
    ]
