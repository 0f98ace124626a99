"""What the advice commands print for a person."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from halfmoon.cli.advise_text import show_bytes
from halfmoon.planner.chunk_advice import ChunkAdvice, ChunkFigures, Range
from halfmoon.planner.kv_advice import KvAdvice


def print_kv(console: Console, advice: KvAdvice) -> None:
    ranks = advice.tensor_parallel
    console.print(
        f"{advice.model_type}: {advice.attention}, {advice.dtype}: {advice.bytes_per_token:,} bytes a token"
        + (f", {advice.rank_bytes_per_token:,} on each of {ranks} ranks" if ranks > 1 else ""),
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    if len(advice.layers) > 1 or advice.layers[0].window_tokens:
        table = _table("layers", "kind", "bytes a token", "window")
        for layers in advice.layers:
            window = f"{layers.window_tokens:,} tokens" if layers.window_tokens else ""
            table.add_row(str(layers.num_layers), layers.kind, f"{layers.bytes_per_token:,}", window)
        console.print(table)
    table = _table("context", "bytes", "", *(["on each rank"] if ranks > 1 else []))
    for size in advice.contexts:
        rank = [show_bytes(size.rank_bytes)] if ranks > 1 else []
        table.add_row(f"{size.num_tokens:,}", f"{size.num_bytes:,}", show_bytes(size.num_bytes), *rank)
    console.print(table)
    if (fit := advice.arena) is not None:
        console.print(
            f"an arena of {show_bytes(fit.arena_bytes)} holds {fit.num_chunks:,} chunks of {fit.chunk_tokens} tokens "
            f"({show_bytes(fit.slot_bytes)} each): {fit.num_tokens:,} tokens",
            highlight=False,
            soft_wrap=True,
        )
    _notes(console, advice.assumptions)


def print_chunks(console: Console, advice: ChunkAdvice, source: str, warnings: tuple[str, ...]) -> None:
    console.print(
        f"{escape(source)}: {advice.num_requests:,} requests, {advice.prompt_tokens:,} prompt tokens",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(header_style="bold")
    for heading in ("", *(str(each.chunk_tokens) for each in advice.sizes)):
        table.add_column(heading, justify="right" if heading else "left")
    for heading, cells in _rows(advice.sizes):
        table.add_row(heading, *cells)
    console.print(table)
    console.print(advice.sentence, highlight=False, style="bold", markup=False, soft_wrap=True)
    _notes(console, (*advice.notes, *warnings))


def _rows(sizes: tuple[ChunkFigures, ...]) -> list[tuple[str, list[str]]]:
    return [
        ("tokens reused", [_share(each.reuse) for each in sizes]),
        ("compute saved", [_share(each.saved_share) for each in sizes]),
        ("records", [_count(each.num_records) for each in sizes]),
        ("bytes a chunk", ["?" if each.chunk_bytes is None else show_bytes(each.chunk_bytes) for each in sizes]),
        ("transfers a request", [f"{each.transfers_per_request:,.1f}" for each in sizes]),
        ("mean transfer", [_transfer(each) for each in sizes]),
        ("in partial chunks", [f"{each.partial_share:.1%}" for each in sizes]),
        ("slots left empty", [f"{each.empty_share:.1%}" for each in sizes]),
    ]


def _transfer(each: ChunkFigures) -> str:
    return f"{each.transfer_tokens:.0f} tokens" if each.transfer_bytes is None else show_bytes(each.transfer_bytes)


def _share(found: Range | None) -> str:
    if found is None:
        return "?"
    return f"{found.low:.1%}" if found.is_exact else f"{100 * found.low:.1f}–{found.high:.1%}"


def _count(found: Range | None) -> str:
    if found is None:
        return "?"
    return f"{found.low:,.0f}" if found.is_exact else f"{_thousands(found.low)}–{_thousands(found.high)}"


def _thousands(value: float) -> str:
    return f"{value:,.0f}" if value < 10_000 else f"{value / 1000:,.0f}k"


def _table(*headings: str) -> Table:
    table = Table(header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    return table


def _notes(console: Console, notes: tuple[str, ...]) -> None:
    for note in notes:
        console.print(f"- {note}", markup=False, highlight=False, soft_wrap=True)
