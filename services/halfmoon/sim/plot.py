"""A simulation as pictures: load over time, and how long requests took."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfmoon.sim.errors import SimError


def check_plot(folder: Path) -> None:
    """Before a long run: whether pictures can be drawn there. Raises `SimError`."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise SimError("plots need matplotlib: pip install 'halfmoon[plots]'") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SimError(f"{folder} can't be made: {error.strerror}") from None


def draw(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """Pictures of one record; the files. Raises `SimError`."""
    load = found["load"]
    title = f"simulated: {found['trace']}, {found['instances']}, {found['policy']}, admission {found['admission']}"
    panels = {
        "load.svg": (
            (
                "Prefill: seconds ahead",
                {"mean": load["prefill_backlog_s"], "max": load["max_prefill_backlog_s"]},
            ),
            ("Decode: sequences in a batch", {"mean": load["decode_batch"]}),
            ("Rejected so far", {"requests": load["num_rejected"]}),
        ),
    }
    return [series(folder / name, title, load["at_s"], rows) for name, rows in panels.items()] + [
        _times(folder / "times.svg", title, found)
    ]


def series(path: Path, title: str, at_s: list[float], rows: tuple[tuple[str, Mapping[str, list[float]]], ...]) -> Path:
    """One panel below the other, over the same time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.2 * len(rows) + 0.6), layout="constrained")
    figure.suptitle(title, fontsize=10)
    grid = figure.subplots(len(rows), 1, sharex=True, squeeze=False)
    for axes, (heading, lines) in zip(grid[:, 0], rows, strict=True):
        for name, values in lines.items():
            axes.plot(at_s, values, label=name, linewidth=1)
        axes.set_title(heading, fontsize=9, loc="left")
        axes.set_ylim(bottom=0)
        if len(lines) > 1:
            axes.legend(fontsize=8, frameon=False)
    grid[-1, 0].set_xlabel("virtual time (s)", fontsize=9)
    return _save(figure, path)


def _times(path: Path, title: str, found: Mapping[str, Any]) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    figure.suptitle(title, fontsize=10)
    for axes, (name, heading) in zip(
        figure.subplots(1, 3), (("ttft_s", "TTFT (s)"), ("tbt_s", "TBT (s)"), ("e2e_s", "E2E (s)")), strict=True
    ):
        each = {label: value for label, value in found[name].items() if value is not None}
        bars = axes.bar(list(each), list(each.values()), color="#2b6cb0")
        axes.bar_label(bars, fmt="{:.3g}", fontsize=8)
        axes.set_title(heading, fontsize=9, loc="left")
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import rc_context

    try:
        # Text stays text, and nothing in the file depends on when it was drawn: small, and the same for the same run.
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "halfmoon"}):
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise SimError(f"{path} can't be written: {error.strerror}") from None
    return path
