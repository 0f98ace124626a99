"""Chunk-size advice as a picture: one panel for each figure, the recommended size in colour."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from halfmoon.planner.chunk_advice import ChunkAdvice, ChunkFigures, Range

SUFFIXES = (".png", ".svg", ".pdf")
_CHOSEN, _OTHER, _SPAN = "#2b6cb0", "#b8c4d0", "#333333"


class PlotError(Exception):
    """The picture can't be drawn or written; the message says what to do."""


def check_plot(path: Path) -> None:
    """Before hours of recording: whether `path` could be drawn to. Raises `PlotError`."""
    if path.suffix not in SUFFIXES:
        raise PlotError(f"{path}: pictures end with {', '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise PlotError(f"{path}: there is no folder {path.absolute().parent}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise PlotError("plots need matplotlib: pip install 'halfmoon[plots]'") from None


def draw(advice: ChunkAdvice, path: Path, title: str) -> None:
    """Raises `PlotError`."""
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    figure.suptitle(title, fontsize=12)
    sizes = advice.sizes
    panels: tuple[tuple[str, list[Range | None], str], ...] = (
        ("Prompt tokens reused (%)", [_scaled(each.reuse, 100) for each in sizes], "{:.1f}"),
        ("Metadata records", [each.num_records for each in sizes], "{:,.0f}"),
        ("Transfers per request", [_exact(each.transfers_per_request) for each in sizes], "{:.1f}"),
        ("Slots left empty by partial chunks (%)", [_exact(100 * each.empty_share) for each in sizes], "{:.1f}"),
    )
    for axes, (heading, ranges, form) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        _bars(axes, sizes, ranges, heading, form, advice.recommended)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise PlotError(f"{path} can't be written: {error.strerror}") from None


def _bars(
    axes: Any,
    sizes: Sequence[ChunkFigures],
    ranges: Sequence[Range | None],
    heading: str,
    form: str,
    chosen: int | None,
) -> None:
    axes.set_title(heading, fontsize=10)
    axes.set_xlabel("tokens per chunk", fontsize=9)
    axes.set_xticks(range(len(sizes)), [str(each.chunk_tokens) for each in sizes])
    axes.spines[["top", "right"]].set_visible(False)
    known = [(place, found) for place, found in enumerate(ranges) if found is not None]
    if not known:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "this trace doesn't tell", ha="center", va="center", transform=axes.transAxes)
        return
    top = max(found.high for _, found in known) or 1.0
    for place, found in known:
        colour = _CHOSEN if sizes[place].chunk_tokens == chosen else _OTHER
        axes.bar(place, found.low, color=colour, width=0.65)
        label = form.format(found.low)
        if not found.is_exact:
            axes.plot([place, place], [found.low, found.high], color=_SPAN, linewidth=1.5, marker="_", markersize=9)
            label = f"{label}–{form.format(found.high)}"
        axes.annotate(
            label, (place, found.high), xytext=(0, 4), textcoords="offset points", ha="center", fontsize=9, color=_SPAN
        )
    axes.set_ylim(0, 1.15 * top)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_xlim(-0.6, len(sizes) - 0.4)


def _scaled(found: Range | None, factor: float) -> Range | None:
    return None if found is None else Range(factor * found.low, factor * found.high)


def _exact(value: float) -> Range:
    return Range(value, value)
