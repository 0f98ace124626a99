"""What `halfmoon doctor` prints for a person."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from halfmoon.cli.doctor.report import Pair, Report, Verdict
from halfmoon.schemas.probes import ProbedPath

_MARKS = {Verdict.GOOD: "[green]ok[/]", Verdict.WARNING: "[yellow]warning[/]", Verdict.BAD: "[red]bad[/]"}


def print_report(console: Console, report: Report) -> None:
    checks = Table(title="Checks", title_justify="left")
    for heading in ("", "what", "found"):
        checks.add_column(heading, overflow="fold")
    for check in report.checks:
        checks.add_row(_MARKS[check.verdict], escape(check.name), escape(check.detail))
    if report.members:
        console.print(_members(report))
    if report.pairs:
        console.print(_pairs(report))
    console.print(checks)
    console.print("[green]all is well[/]" if report.is_well else "[red]something is broken[/]")


def _members(report: Report) -> Table:
    table = Table(title="Members", title_justify="left")
    for heading in ("what", "name", "node", "state"):
        table.add_column(heading, overflow="fold")
    for member in report.members:
        state = member.state if member.is_heard else "[red]silent[/]"
        table.add_row(member.what, escape(member.worker), escape(member.node or ""), state)
    return table


def _pairs(report: Report) -> Table:
    table = Table(title="How nodes read from each other", title_justify="left", show_lines=True)
    for heading in ("reader", "source", "chosen"):
        table.add_column(heading, overflow="fold")
    table.add_column("GB/s", justify="right")
    table.add_column("all, best first", overflow="fold")
    for pair in report.pairs:
        chosen = f"[green]{pair.chosen}[/]" if pair.chosen is not None else "[red]none[/]"
        table.add_row(escape(pair.reader), escape(pair.source), chosen, _speed(pair.gb_per_s), escape(_told(pair)))
    return table


def _told(pair: Pair) -> str:
    lines = [_path(path) for path in pair.paths]
    return "\n".join([*lines, pair.detail] if pair.detail else lines)


def _path(path: ProbedPath) -> str:
    if path.gb_per_s is not None:
        much, each = f"{path.num_bytes / 2**20:,.0f} MiB", f"{path.slice_bytes / 2**10:,.0f} KiB"
        return f"{path.transport}: {_speed(path.gb_per_s)} GB/s, {much} in slots of {each}"
    return f"{path.transport}: {path.reason or ('usable' if path.is_usable else 'not usable')}"


def _speed(gb_per_s: float | None) -> str:
    return "" if gb_per_s is None else f"{gb_per_s:.2f}"
