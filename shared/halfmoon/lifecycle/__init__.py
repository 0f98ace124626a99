"""How every service starts, beats, drains and stops."""

from halfmoon.lifecycle.process import run
from halfmoon.lifecycle.runtime import Runtime, Service, StartupError

__all__ = ["Runtime", "Service", "StartupError", "run"]
