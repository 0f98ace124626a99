"""Runs every measurement, one after the other, and writes docs/benchmarks.md. `make bench`; about twenty minutes.

`make bench ARGS=transports` measures these alone, and replaces their section; so do `… overlap`, `index`,
`scheduling`, `ssd` and `live`.

Let nothing else run meanwhile: comparisons are made side by side in one run, but absolute figures are the machine's.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import index, live, overlap, scheduling, ssd, system, transport_bandwidth, transport_page

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
AIMS = {
    "decode, batch 1": "≥ 1.0×",
    "decode, batch 8": "4× of batch 1",
    "decode, batch 16": "6× of batch 1",
    "prefill, 512 tokens": "≥ 1.1×",
}


def measure_engine(threads: int, rounds: int) -> dict[str, Any]:
    """In a process of its own: threads and memory of one measurement mustn't disturb the next."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "engine.json"
        command = ["-m", "benchmarks.engine", f"--threads={threads}", f"--rounds={rounds}", f"--json={result}"]
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def page(
    engines: Sequence[dict[str, Any]],
    figures: system.SystemFigures,
    bandwidths: transport_bandwidth.Figures,
    overlaps: Sequence[overlap.Overlap],
    indexes: index.Figures,
    disks: ssd.Figures,
    decisions: Sequence[scheduling.Figure],
    lives: live.Figures,
) -> str:
    lines = [
        "# Benchmarks",
        "",
        f"Written by `make bench` on {date.today():%Y-%m-%d}: {_processor()}, {os.cpu_count()} cores, no GPU; Python "
        f"{platform.python_version()}, torch {version('torch')}, transformers {version('transformers')}. "
        "SmolLM2-135M-Instruct, fp32. On a shared machine single figures vary by 20 %; ratios are side by side in one "
        "run.",
        "",
        "## The torch engine against transformers' `generate`",
        "",
        "Same weights, same threads, by turns; tokens a second, medians. A worker gets one thread where two cores "
        "serve a prefill and a decode worker.",
    ]
    for engine in engines:
        names = engine["figures"]
        alone = names["decode, batch 1"]["halfmoon"]
        lines += [
            "",
            f"{engine['threads']} thread{'s' if engine['threads'] > 1 else ''}:",
            "",
            "| | halfmoon | transformers | ratio | of batch 1 | aim |",
            "|---|---|---|---|---|---|",
        ]
        for name, found in names.items():
            ours, theirs = found["halfmoon"], found["transformers"]
            gain = f"{ours / alone:.1f}×" if name.startswith("decode") else ""
            lines.append(
                f"| {name} | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f}× | {gain} | {AIMS.get(name, '')} |"
            )
    bare, through, sim = figures.bare, figures.system, figures.sim
    lines += [
        "",
        "## What the system adds to the bare engine",
        "",
        f"A prompt of {system.SHORT_PROMPT_TOKENS} tokens, {system.NUM_TOKENS} tokens out, one request at a time, over "
        f"HTTP, {system.ROUNDS} requests. Bare: the same engine alone, doing the same work (prefill, copy out, copy "
        "in, decode). Simulated: an engine that takes no time, so that all of it is the system's own (gateway, broker, "
        "conductor, both workers, both pools).",
        "",
        "| milliseconds | first token p50 | p99 | between tokens p50 |",
        "|---|---|---|---|",
        f"| bare engine | {bare.first_p50_ms:.1f} | {bare.first_p99_ms:.1f} | {bare.token_p50_ms:.2f} |",
        f"| the system | {through.first_p50_ms:.1f} | {through.first_p99_ms:.1f} | {through.token_p50_ms:.2f} |",
        f"| added | {through.first_p50_ms - bare.first_p50_ms:+.1f} | {through.first_p99_ms - bare.first_p99_ms:+.1f} "
        f"| {through.token_p50_ms - bare.token_p50_ms:+.2f} |",
        f"| simulated engine, no time | {sim.first_p50_ms:.1f} | {sim.first_p99_ms:.1f} | {sim.token_p50_ms:.2f} |",
        "",
        f"## TTFT of a prompt of {system.LONG_PROMPT_TOKENS:,} tokens",
        "",
        f"Chunks of {system.CHUNK_TOKENS} tokens; medians of {system.LONG_ROUNDS}. Remote: all whole chunks lie in the "
        "other node's pool, and are pulled over shared memory.",
        "",
        "| | ms | of cold |",
        "|---|---|---|",
        f"| cold | {figures.cold_ms:,.0f} | |",
        f"| cached on the prefill worker's node | {figures.local_ms:,.0f} | {_share(figures.local_ms, figures)} |",
        f"| cached on another node | {figures.remote_ms:,.0f} | {_share(figures.remote_ms, figures)} |",
        "",
        *transport_page.section(bandwidths),
        "",
        *overlap.section(overlaps),
        "",
        *index.section(indexes),
        "",
        *scheduling.section(decisions),
        "",
        *ssd.section(disks),
        "",
        *live.section(lives),
    ]
    return "\n".join(lines) + "\n"


def measure_alone(name: str, console: Console) -> None:
    """One section anew, in the page that is there."""
    sections: dict[str, tuple[str, Callable[[], list[str]]]] = {
        "transports": (transport_page.HEADING, lambda: transport_page.section(transport_bandwidth.run())),
        "index": (index.HEADING, lambda: index.section(index.run())),
        "ssd": (ssd.HEADING, lambda: ssd.section(ssd.run())),
        "overlap": (overlap.HEADING, lambda: overlap.section(overlap.measure())),
        "live": (live.HEADING, lambda: live.section(live.run())),
        "scheduling": (scheduling.HEADING, lambda: scheduling.section(scheduling.run())),
    }
    if name not in sections:
        sys.exit(f"no measurement is called {name!r}: say one of {', '.join(sections)}, or nothing for all")
    heading, measure = sections[name]
    with console.status(name):
        lines = measure()
    PAGE.write_text(transport_page.replaced(PAGE.read_text(), heading, lines))
    console.print("\n".join(lines), markup=False, highlight=False)


def _share(ms: float, figures: system.SystemFigures) -> str:
    return f"{ms / figures.cold_ms:.2f}×"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def main() -> None:
    console = Console()
    if sys.argv[1:]:
        measure_alone(" ".join(sys.argv[1:]), console)
        return
    with console.status("the engine, one thread, then all") as status:
        engines = [measure_engine(1, 5), measure_engine(os.cpu_count() or 1, 3)]
        status.update("the system")
        figures = system.measure()
        status.update("the transports")
        bandwidths = transport_bandwidth.run()
        status.update("the hand-over")
        overlaps = overlap.measure()
        status.update("the chunk index")
        indexes = index.run()
        status.update("scheduling")
        decisions = scheduling.run()
        status.update("the disk")
        disks = ssd.run()
        status.update("the simulator")
        lives = live.run()
    text = page(engines, figures, bandwidths, overlaps, indexes, disks, decisions, lives)
    PAGE.write_text(text)
    console.print(text, markup=False, highlight=False)


if __name__ == "__main__":
    main()
