"""The fingerprint of a model: what it is, whatever it is called.

Two models share KV only when their fingerprints are equal, so it covers every byte of config and weights. Hashing
half a gigabyte takes a second; so the result is kept beside the model, and holds as long as no file's size or time of
change differs.
"""

import contextlib
import hashlib
import json
import os

from halfmoon.models.folder import ModelFolder

_SIDECAR = ".halfmoon-fingerprint.json"


def fingerprint(model: ModelFolder) -> str:
    """Hex sha256 over names and contents of config and weights. Raises `ModelFolderError` where weights are missing."""
    files = model.weight_files() if model.is_gguf else [model.path / "config.json", *model.weight_files()]
    sidecar = (model.path.parent if model.is_gguf else model.path) / (
        f".{model.path.name}{_SIDECAR}" if model.is_gguf else _SIDECAR
    )
    state = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(sidecar.read_text())
        if known["files"] == state:
            return str(known["sha256"])
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    with contextlib.suppress(OSError):  # a read-only folder: hash again next time
        scratch = sidecar.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps({"files": state, "sha256": digest.hexdigest()}))
        scratch.replace(sidecar)
    return digest.hexdigest()
