"""A waterfall as text for a terminal: aligned columns, and bars to scale."""

from collections.abc import Iterator
from math import ceil

from halfmoon.tracing.timeline import Row, RowKind, Waterfall

_GLYPHS = {
    RowKind.ENVELOPE: "─",
    RowKind.WAIT: "░",
    RowKind.MOVE: "▒",
    RowKind.WORK: "█",
    RowKind.MARK: "◆",
}
_LEGEND = "░ waiting   ▒ moving KV   █ computing   ◆ first token"
_MIN_WIDTH = 60
_MAX_LABEL_COLUMNS = 24
_TIME_COLUMNS = 8
_LONG_MS = 100_000.0


def render(waterfall: Waterfall, width: int = 100) -> str:
    """The waterfall in lines of at most `width` columns (60 at least), without colours or markup.

    What does not fit is cut at the right, with an ellipsis: first the details, then the labels, never a time.
    """
    width = max(width, _MIN_WIDTH)
    lines = [*_head(waterfall), "", *_table(waterfall, width), "", _LEGEND, *_foot(waterfall)]
    return "\n".join(_clip(line, width) for line in lines)


def _head(waterfall: Waterfall) -> Iterator[str]:
    yield f"request {waterfall.request_id}   trace {', '.join(waterfall.trace_ids)}"
    tokens = []
    if waterfall.prompt_tokens is not None:
        cached = f" ({waterfall.cached_tokens} cached)" if waterfall.cached_tokens is not None else ""
        tokens.append(f"prompt {waterfall.prompt_tokens} tokens{cached}")
    if waterfall.completion_tokens is not None:
        tokens.append(f"completion {waterfall.completion_tokens} tokens")
    about = [waterfall.model, *tokens]
    if any(about):
        yield "   ".join(part for part in about if part)
    ttft = "not recorded" if waterfall.ttft_ms is None else f"{waterfall.ttft_ms:.2f} ms"
    yield f"TTFT {ttft}   total {waterfall.total_ms:.2f} ms"
    for side, counts in waterfall.outcomes.items():
        yield f"chunks at {side}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items())


def _table(waterfall: Waterfall, width: int) -> Iterator[str]:
    labels = ["  " * row.depth + row.label for row in waterfall.rows]
    label_columns = min(max((len(label) for label in labels), default=0), _MAX_LABEL_COLUMNS)
    flexible = width - label_columns - 2 * (_TIME_COLUMNS + 1) - 4
    details = [f"✗ {row.detail}" if row.failed else row.detail for row in waterfall.rows]
    detail_columns = min(max((len(detail) for detail in details), default=0), flexible * 2 // 3)
    bar_columns = flexible - detail_columns
    decimals = 2 if waterfall.total_ms < _LONG_MS else 0

    def line(label: str, start: str, duration: str, bar: str, detail: str) -> str:
        cells = f"{_clip(label, label_columns):<{label_columns}} {start:>{_TIME_COLUMNS}} {duration:>{_TIME_COLUMNS}}"
        return f"{cells}  {bar}  {detail}".rstrip()

    axis = _axis(waterfall.total_ms, bar_columns)
    yield line("what", "start ms", "ms", axis, "detail" if detail_columns else "")
    for row, label, detail in zip(waterfall.rows, labels, details, strict=True):
        duration = "" if row.kind is RowKind.MARK else f"{row.duration_ms:.{decimals}f}"
        bar = _bar(row, waterfall.total_ms, bar_columns)
        yield line(label, f"{row.start_ms:.{decimals}f}", duration, bar, detail)


def _axis(total_ms: float, columns: int) -> str:
    left, right = "0 ms ", f" {total_ms:.0f} ms"
    return left + "─" * max(1, columns - len(left) - len(right)) + right


def _bar(row: Row, total_ms: float, columns: int) -> str:
    """`columns` cells; cell i stands for [i, i + 1) · total / columns. Everything gets one cell at least."""
    per_ms = columns / total_ms if total_ms > 0 else 0.0
    first = min(max(int(row.start_ms * per_ms), 0), columns - 1)
    last = min(max(ceil((row.start_ms + row.duration_ms) * per_ms), first + 1), columns)
    return (" " * first + _GLYPHS[row.kind] * (last - first)).ljust(columns)


def _foot(waterfall: Waterfall) -> Iterator[str]:
    if waterfall.later:
        yield ""
        yield "later, to this request's chunks"
        for row in waterfall.later:
            yield f"  +{row.start_ms / 1000:.2f} s  {row.label}  {row.detail}".rstrip()
    if waterfall.not_seen:
        yield ""
        yield f"not seen: {', '.join(waterfall.not_seen)}"
        yield "(still running, sampled out, not part of this request, or kept in another host's store)"


def _clip(text: str, columns: int) -> str:
    return text if len(text) <= columns else text[: columns - 1] + "…"
