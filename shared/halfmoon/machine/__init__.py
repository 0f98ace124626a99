"""State machines as data: a transition table, its interpreter, and its diagram."""

from halfmoon.machine.machine import IllegalTransition, Machine, Table, diagram

__all__ = ["IllegalTransition", "Machine", "Table", "diagram"]
