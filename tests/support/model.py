"""The real small model, for tests: fetched once per machine; `python -m support.model` does it ahead of them."""

import os
from pathlib import Path

from halfmoon.models.smollm2 import NAME, fetch, fetch_gguf


def small_model() -> Path:
    """The folder of SmolLM2-135M-Instruct: in HALFMOON_MODELS_DIR, or in the user's cache."""
    if not (_models_dir() / NAME).exists():
        small_gguf()  # which other tests need: what is kept is downloaded once
    return fetch(_models_dir())


def small_gguf() -> Path:
    """The GGUF file that the folder is made from."""
    return fetch_gguf(_models_dir())


def _models_dir() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(os.environ.get("HALFMOON_MODELS_DIR", cache / "halfmoon" / "models"))


if __name__ == "__main__":
    small_model()
