"""Greedy completions by plain transformers: what every engine, cache and path through the system must say as well."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from halfmoon.models import ModelFolder
from halfmoon.models.fingerprint import fingerprint

_SCRIPT = Path(__file__).with_name("reference_generate.py")
_TIMEOUT_S = 280.0


def greedy(model: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """`max_tokens` new token ids for each prompt; end-of-sequence ids don't end it.

    Computed by `reference_generate.py` in a process of its own, once per machine for each model, prompt and library.
    """
    cache = Path(tempfile.gettempdir()) / f"halfmoon-reference-{os.getuid()}"
    cache.mkdir(exist_ok=True)
    base = f"{fingerprint(ModelFolder.open(model))} {_identity()} {max_tokens}"
    files = [cache / hashlib.sha256(f"{base} {prompt}".encode()).hexdigest() for prompt in prompts]
    missing = {file: prompt for file, prompt in zip(files, prompts, strict=True) if not file.exists()}
    if missing:
        for file, completion in zip(missing, _generate(model, list(missing.values()), max_tokens), strict=True):
            scratch = file.with_suffix(f".{os.getpid()}")
            scratch.write_text(json.dumps(completion))
            scratch.replace(file)
    return [json.loads(file.read_text()) for file in files]


def _identity() -> str:
    """Changes with whatever could change the reference's answers."""
    libraries: Iterable[str] = (f"{name}={version(name)}" for name in ("torch", "transformers"))
    return " ".join([hashlib.sha256(_SCRIPT.read_bytes()).hexdigest(), *libraries])


def _generate(model: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), str(model)],
        input=json.dumps({"prompts": prompts, "max_new_tokens": max_tokens}),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    completions: list[list[int]] = json.loads(done.stdout)
    assert [len(completion) for completion in completions] == [max_tokens] * len(prompts)
    return completions
