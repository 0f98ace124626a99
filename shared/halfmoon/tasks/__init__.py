"""Tasks, and how they end."""

from halfmoon.tasks.ending import ended

__all__ = ["ended"]
