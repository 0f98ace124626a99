"""The shape of the tree, as far as no other tool holds it."""

import tomllib
from pathlib import Path

from halfmoon.lifecycle import VERSION

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = ("schemas", "tracing", "shared", "services")
SERVICES = ("gateway", "conductor", "prefill", "decode", "kv_tier", "registry")
SCHEDULING = ROOT / "shared" / "halfmoon" / "scheduling"
"""The conductor's policies: the simulator runs them too."""


def packages() -> list[Path]:
    """Every package directly below the namespace `halfmoon`."""
    return [
        path
        for root in SOURCE_ROOTS
        for path in sorted((ROOT / root / "halfmoon").iterdir())
        if path.is_dir() and path.name != "__pycache__"
    ]


def test_halfmoon_is_a_namespace_that_four_roots_share() -> None:
    assert not [root for root in SOURCE_ROOTS if (ROOT / root / "halfmoon" / "__init__.py").exists()]
    names = [path.name for path in packages()]
    assert len(names) == len(set(names))


def test_every_package_says_what_it_is_and_is_typed() -> None:
    for package in packages():
        assert (package / "__init__.py").read_text().startswith('"""'), package
        assert (package / "py.typed").exists(), package


def test_every_service_has_the_same_shape() -> None:
    for service in SERVICES:
        folder = ROOT / "services" / "halfmoon" / service
        for name in ("__main__", "config", "state", "service"):
            assert (folder / f"{name}.py").is_file(), f"{service}/{name}.py"
        assert SCHEDULING.is_dir() if service == "conductor" else (folder / "policy.py").is_file(), service
        assert len((folder / "__main__.py").read_text().splitlines()) <= 30, service


def test_life_cycles_and_policies_are_pure() -> None:
    """No await, no clock, no randomness: a simulator must be able to run them."""
    folders = [ROOT / "services" / "halfmoon" / service for service in SERVICES]
    files = [path for folder in folders for path in (folder / "state.py", folder / "policy.py") if path.exists()]
    for path in (*files, *SCHEDULING.rglob("*.py")):
        for word in ("import asyncio", "import time", "import random", "import secrets", "await ", "async def"):
            assert word not in path.read_text(), f"{path}: {word}"


def test_the_version_is_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION
