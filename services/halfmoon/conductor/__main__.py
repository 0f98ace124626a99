"""`python -m halfmoon.conductor`."""

import sys

from halfmoon import lifecycle
from halfmoon.conductor.config import ConductorConfig
from halfmoon.conductor.service import Conductor

if __name__ == "__main__":
    sys.exit(lifecycle.run("conductor", ConductorConfig, Conductor))
