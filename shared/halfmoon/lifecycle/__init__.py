"""How every service starts, beats, drains and stops."""

from halfmoon.lifecycle.process import run
from halfmoon.lifecycle.runtime import Runtime, Service, StartupError
from halfmoon.lifecycle.version import VERSION

__all__ = ["VERSION", "Runtime", "Service", "StartupError", "run"]
