"""Tasks, and how they end."""

from halfmoon.tasks.batches import batches
from halfmoon.tasks.ending import ended

__all__ = ["batches", "ended"]
