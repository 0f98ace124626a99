"""The real small model, for tests: fetched once per machine."""

import os
from pathlib import Path

from halfmoon.models.smollm2 import fetch


def small_model() -> Path:
    """The folder of SmolLM2-135M-Instruct: in HALFMOON_MODELS_DIR, or in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return fetch(Path(os.environ.get("HALFMOON_MODELS_DIR", cache / "halfmoon" / "models")))
