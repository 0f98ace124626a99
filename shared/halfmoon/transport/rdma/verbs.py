"""Finding pyverbs, the Python binding of rdma-core; the fence around it.

PyPI's pyverbs can't be built against the rdma-core of most distributions, whose own packages (Debian: python3-pyverbs)
lie outside a virtual environment. So it is taken from the environment where it is there, else from the distribution's
folder: that one package alone, so that nothing else in the folder shadows ours.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

DISTRIBUTION_FOLDERS = (Path("/usr/lib/python3/dist-packages"), Path("/usr/lib64/python3/site-packages"))
_PARTS = ("enums", "device", "pd", "mr", "cq", "qp", "wr", "addr", "pyverbs_error")


class RdmaUnavailable(Exception):
    """RDMA can't be used here. The message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Verbs:
    """The parts of pyverbs that are used. They carry no types; `device` and `queue_pair` give them some."""

    enums: ModuleType
    device: ModuleType
    pd: ModuleType
    mr: ModuleType
    cq: ModuleType
    qp: ModuleType
    wr: ModuleType
    addr: ModuleType
    error: type[Exception]
    """Base of what pyverbs raises."""


def load_verbs(folders: Sequence[Path] = DISTRIBUTION_FOLDERS) -> Verbs:
    """Import pyverbs. Raises `RdmaUnavailable`."""
    modules: dict[str, ModuleType] = {}
    try:
        _find(folders)
        for part in _PARTS:
            modules[part] = importlib.import_module(f"pyverbs.{part}")
    except ImportError as error:
        raise RdmaUnavailable(
            f"pyverbs can't be imported ({error}): install it for this Python, "
            f"{sys.version_info[0]}.{sys.version_info[1]} "
            "(on Debian 12: apt-get install python3-pyverbs, with Python 3.11)"
        ) from None
    base = modules.pop("pyverbs_error").PyverbsError
    if not (isinstance(base, type) and issubclass(base, Exception)):
        raise RdmaUnavailable("what is installed as pyverbs isn't rdma-core's")
    return Verbs(**modules, error=base)


def _find(folders: Sequence[Path]) -> None:
    """Make `pyverbs` importable, where it isn't and one of the folders has it."""
    if "pyverbs" in sys.modules or importlib.util.find_spec("pyverbs") is not None:
        return
    for folder in folders:
        root = folder / "pyverbs" / "__init__.py"
        spec = importlib.util.spec_from_file_location("pyverbs", root, submodule_search_locations=[str(root.parent)])
        if spec is None or spec.loader is None or not root.exists():
            continue
        module = importlib.util.module_from_spec(spec)
        sys.modules["pyverbs"] = module
        try:
            spec.loader.exec_module(module)
        except ImportError:
            del sys.modules["pyverbs"]
            raise
        return
