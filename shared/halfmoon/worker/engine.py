"""The engine that the settings ask for."""

from halfmoon.engine.contract import Engine
from halfmoon.lifecycle import StartupError
from halfmoon.worker.config import WorkerConfig


def build_engine(config: WorkerConfig) -> Engine:
    """Not started yet. Raises `StartupError` where the settings make no engine."""
    raise StartupError(f"engine {config.engine!r} is not to be had")
