"""How `halfmoon top` looks."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from halfmoon.cli.top_board import NodeRow, Snapshot, WorkerRow
from halfmoon.schemas.scheduling import CostModel, Forecast

MAX_ROWS = 40
"""Of each table; a terminal has hardly more."""


def screen(snapshot: Snapshot) -> RenderableType:
    return Group(
        _headline(snapshot),
        _table("workers", _WORKER_HEADINGS, [_worker(row) for row in snapshot.workers]),
        _table("nodes", _NODE_HEADINGS, [_node(row) for row in snapshot.nodes]),
        _table("cost models", _MODEL_HEADINGS, [_model(model) for model in snapshot.models]),
    )


_WORKER_HEADINGS = ("worker", "role", "node", "state", "batch", "waiting", "tokens queued", "context", "KV free")
_NODE_HEADINGS = ("node", "state", "chunks", "slots free", "leased", "receiving", "labels")
_MODEL_HEADINGS = ("kind", "of", "fitted", "samples", "error")


def _headline(snapshot: Snapshot) -> Text:
    traffic = snapshot.traffic
    hit = "" if traffic.hit_ratio is None else f"   {traffic.hit_ratio:.0%} of prompt tokens cached"
    failed = f"   {traffic.failed_per_s:.1f} failed/s" if traffic.failed_per_s else ""
    lines = [
        f"{traffic.requests_per_s:.1f} requests/s   {traffic.tokens_per_s:,.0f} tokens/s{hit}{failed}",
        f"TTFT p50 {_ms(traffic.ttft_p50_s)}  p99 {_ms(traffic.ttft_p99_s)}  {_forecast(snapshot.ttft)}",
        f"TBT  p50 {_ms(traffic.tbt_p50_s)}  {_forecast(snapshot.tbt)}",
    ]
    for row in snapshot.conductors:
        report = row.scheduling
        if report is None:
            continue
        threshold = "" if report.balancing_threshold is None else f"  threshold {report.balancing_threshold:.2f}"
        imbalance = "" if report.imbalance is None else f"  imbalance {report.imbalance:.2f}"
        lines.append(
            f"{row.worker}: {report.policy}  {report.num_open} open  {report.num_placed:,} placed{threshold}{imbalance}"
        )
    if not snapshot.conductors:
        lines.append("no conductor is heard")
    return Text("\n".join(lines))


def _forecast(forecast: Forecast | None) -> str:
    if forecast is None:
        return ""
    return (
        f"predicted {_ms(forecast.predicted_s)} against {_ms(forecast.measured_s)} measured, "
        f"off by {forecast.error:.0%} on average"
    )


def _table(title: str, headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", box=None, padding=(0, 1))
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < 2 else "right", no_wrap=True)
    for row in rows[:MAX_ROWS]:
        table.add_row(*(Text(cell) for cell in row))
    if len(rows) > MAX_ROWS:
        table.add_row(f"and {len(rows) - MAX_ROWS} more")
    return table


def _worker(row: WorkerRow) -> tuple[str, ...]:
    free = f"{row.free_tokens / row.total_tokens:.0%}" if row.total_tokens else ""
    return (
        row.worker,
        row.role,
        row.node,
        row.state,
        f"{row.num_running}/{row.max_requests}",
        str(row.num_waiting),
        f"{row.queued_tokens:,}",
        f"{row.context_tokens:,}",
        free,
    )


def _node(row: NodeRow) -> tuple[str, ...]:
    labels = " ".join(f"{name}={value}" for name, value in sorted(row.labels.items()))
    return (
        row.node,
        row.state,
        f"{row.num_chunks:,}",
        f"{row.num_free:,}/{row.num_slots:,}",
        f"{row.num_leased:,}",
        f"{row.receiving_bytes / 1e6:,.0f} MB" if row.receiving_bytes else "",
        labels,
    )


def _model(model: CostModel) -> tuple[str, ...]:
    return (model.kind, model.subject, fitted(model), f"{model.num_samples:,}", f"{model.error:.0%}")


def fitted(model: CostModel) -> str:
    """The line in units that say something: milliseconds, tokens a second, gigabytes a second."""
    first, *rest = model.coefficients
    parts = [f"{first * 1e3:.1f} ms"]
    match model.kind:
        case "prefill":
            parts += [f"{_per_s(rest[0])} tokens/s", f"{rest[1] * 1e9:.2f} ns/pair"]
        case "tbt":
            parts += [f"{rest[0] * 1e3:.2f} ms/request", f"{rest[1] * 1e6:.2f} µs/token"]
        case _:
            parts += [f"{1 / rest[0] / 1e9:.2f} GB/s" if rest[0] > 0 else "no cost by bytes"]
    return " + ".join(parts)


def _per_s(seconds: float) -> str:
    return f"{1 / seconds:,.0f}" if seconds > 0 else "∞"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1e3:,.1f} ms" if seconds < 10 else f"{seconds:,.1f} s"
