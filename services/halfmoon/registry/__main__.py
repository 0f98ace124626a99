"""`python -m halfmoon.registry`."""

import sys

from halfmoon import lifecycle
from halfmoon.registry.config import RegistryConfig
from halfmoon.registry.service import Registry


def main() -> int:
    return lifecycle.run("registry", RegistryConfig, Registry)


if __name__ == "__main__":
    sys.exit(main())
