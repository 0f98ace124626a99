"""The conductor's chunk index at a million chunks, beside Dynamo's radix tree through its Python binding.

`make bench ARGS=index`: about two minutes, one of them for installing Dynamo's wheel where it isn't cached.
"""

import os
import statistics
import subprocess
import sys
import venv
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.index_load import NUM_ASKED, NUM_WORKERS, PROMPT_CHUNKS

HEADING: Final = "## The conductor's chunk index"
ROUNDS: Final = 9
CACHE: Final = Path.home() / ".cache" / "halfmoon" / "benchmarks"
HUGE_PAGES: Final = "glibc.malloc.hugetlb=1"
_DYNAMO: Final = "ai-dynamo-runtime"
_HERE: Final = Path(__file__).parent
_INSTALL_S: Final = 90
_IMPORT: Final = ("-c", "from dynamo._core import RadixTree")


class Skipped(Exception):
    """It can't be had here; the message says why."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One index; medians of the rounds."""

    name: str
    num_chunks: int
    bytes_per_chunk: float
    build_s: float
    lookups_per_s: float
    lookups_per_cpu_s: float
    """By processor time of the whole process: what one core does that nothing else disturbs."""


@dataclass(frozen=True, slots=True)
class Figures:
    rows: tuple[Figure, ...]
    skipped: str | None


class _Process:
    def __init__(self, name: str, command: Sequence[str | Path], folder: Path, **environ: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._walls_s: list[float] = []
        self._cpus_s: list[float] = []
        self._built = self._line("BUILT")

    def round(self) -> None:
        self._say("")
        wall_s, cpu_s = self._line("ROUND")
        self._walls_s.append(wall_s)
        self._cpus_s.append(cpu_s)

    def figure(self) -> Figure:
        num_chunks, bytes_per_chunk, build_s = self._built
        return Figure(
            self.name,
            int(num_chunks),
            bytes_per_chunk,
            build_s,
            1 / statistics.median(self._walls_s),
            1 / statistics.median(self._cpus_s),
        )

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _line(self, word: str) -> list[float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return [float(text) for text in line.split()[1:]]
        raise Skipped(f"{self.name} ended without saying {word}")


def run(cache: Path = CACHE) -> Figures:
    """Build all of them, then ask them by turns."""
    skipped = None
    ours = [sys.executable, "-m", "benchmarks.index_ours"]
    with ExitStack() as stack:

        def start(name: str, command: Sequence[str | Path], folder: Path, **environ: str) -> _Process:
            process = _Process(name, command, folder, **environ)
            stack.callback(process.close)
            return process

        processes = [
            start("halfmoon, one holder each", [*ours, "1"], _HERE.parent),
            start("halfmoon, one holder each, huge pages", [*ours, "1"], _HERE.parent, GLIBC_TUNABLES=HUGE_PAGES),
            start("halfmoon, three holders each", [*ours, "3"], _HERE.parent),
        ]
        try:
            command: list[str | Path] = [_dynamo_python(cache), _HERE / "index_dynamo.py", "1"]
            processes.append(start("Dynamo's `RadixTree` from Python, one holder each", command, _HERE))
        except Skipped as reason:
            skipped = str(reason)
        for _ in range(ROUNDS):
            for process in processes:
                process.round()
        return Figures(tuple(process.figure() for process in processes), skipped)


def section(figures: Figures) -> list[str]:
    return [
        HEADING,
        "",
        f"A million chunks on {NUM_WORKERS} nodes, in prompts of {PROMPT_CHUNKS}; the longest prefix of "
        f"{NUM_ASKED:,} of them looked up in each of {ROUNDS} rounds, by turns, medians. One process and one "
        "thread each (Dynamo's tree has a thread of its own behind the binding). By processor time: what a "
        "core does that nothing else disturbs. Bytes: growth of the resident memory over the whole build. "
        "Building is from encoded events: MessagePack with all metadata for halfmoon, JSON for Dynamo.",
        "",
        "| | chunks | bytes a chunk | built in | lookups/s | by processor time |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row.name} | {row.num_chunks:,} | {row.bytes_per_chunk:.0f} | {row.build_s:.1f} s "
            f"| {row.lookups_per_s:,.0f} | {row.lookups_per_cpu_s:,.0f} |"
            for row in figures.rows
        ),
        "",
        "Aims: at least 100,000 lookups/s and at most 150 bytes a chunk. Dynamo's figure holds the way from "
        "Python to its thread and back, so it says little about the tree inside, which its router uses from "
        "Rust; its answer counts each worker's blocks, halfmoon's names the holders of each chunk. Its "
        "entries are named by 64-bit hashes, halfmoon's by whole 32-byte keys. In halfmoon, chunks that follow one "
        "another are kept in runs: a prompt is looked up once for each run that its chunks have, here one, in a table "
        "of the runs' first chunks, and compared with the run's keys, which lie together; it would be 24 times, in a "
        "table of 40 MB, if no chunk had a neighbour. Memory is what it waits for, so a machine whose other cores are "
        "busy shows less. "
        f"Huge pages: the process was started with `GLIBC_TUNABLES={HUGE_PAGES}`.",
        *([] if figures.skipped is None else ["", f"Not measured: {_DYNAMO}, {figures.skipped}."]),
    ]


def _dynamo_python(cache: Path) -> Path:
    """An interpreter that has Dynamo's wheel, installed once. Raises `Skipped`."""
    folder = cache / "dynamo"
    python = folder / "bin" / "python"
    if python.exists() and subprocess.run([python, *_IMPORT], capture_output=True, check=False).returncode == 0:
        return python
    try:
        venv.create(folder, with_pip=True, clear=True)
        install: list[str | Path] = [python, "-m", "pip", "install", "-q", "--no-deps", _DYNAMO]
        subprocess.run(install, capture_output=True, check=True, timeout=_INSTALL_S)
        subprocess.run([python, *_IMPORT], capture_output=True, check=True, timeout=_INSTALL_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise Skipped(f"it can't be installed or started: {type(error).__name__}") from None
    return python
