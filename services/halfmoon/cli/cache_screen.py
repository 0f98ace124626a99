"""What `halfmoon cache` prints for a person."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from halfmoon.cli.advise_text import show_bytes
from halfmoon.cli.cache_report import Listing, Stat
from halfmoon.cli.cache_warm import Warmed
from halfmoon.schemas.chunks import Tier
from halfmoon.schemas.ids import NodeId, WorkerId
from halfmoon.schemas.registry import Flushed, PinsChanged

_KEY_DIGITS = 16
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"))


def print_listing(console: Console, found: Listing, now_ns: int, *, of_prefixes: bool) -> None:
    headings = ("key", "prefix tokens" if of_prefixes else "up to token", "bytes", "model", "tenant", "where")
    table = _table(*headings, "hits", "age", "unused for", "pinned", left=("key", "model", "tenant", "where"))
    for row in found.chunks:
        where = ", ".join(f"{copy.node}:{copy.tier.value}" for copy in row.copies)
        table.add_row(
            row.key[:_KEY_DIGITS],
            f"{row.prefix_tokens:,}",
            show_bytes(row.num_bytes),
            escape(row.model),
            escape(row.tenant),
            escape(where),
            f"{row.hits:,}",
            _ago(now_ns - row.created_ns),
            _ago(now_ns - row.last_access_ns) if row.last_access_ns else "",
            "yes" if row.pinned else "",
        )
    console.print(table)
    shown = sum(len(row.copies) for row in found.chunks)
    _say(console, f"{len(found.chunks):,} chunks, {shown:,} of {found.num_copies:,} copies; --json shows whole keys")
    if found.next is not None:
        _say(console, f"more: --sort key --after {found.next}")
    _failures(console, found.failed)


def print_stat(console: Console, stat: Stat) -> None:
    table = _table(
        "node", "tier", "chunks", "used", "of", "free", "staged", "ready", "leased", "pinned", "hits", "misses",
        left=("node", "tier"),
    )  # fmt: skip
    for node in stat.nodes:
        pool, size = node.pool, node.slot_bytes
        slots = [f"{count:,}" for count in (pool.free, pool.staged, pool.ready, pool.leased, pool.pinned)]
        hits = pool.hits_local + pool.hits_remote
        used = show_bytes((pool.total - pool.free) * size), show_bytes(pool.total * size)
        state = "" if node.state.value == "serving" else f" ({node.state.value})"
        table.add_row(
            escape(node.node + state),
            Tier.DRAM.value,
            f"{pool.num_chunks:,}",
            *used,
            *slots,
            f"{hits:,}",
            f"{pool.misses:,}",
        )
        if pool.ssd is not None:
            ssd = pool.ssd
            table.add_row(
                "", Tier.SSD.value, f"{ssd.num_chunks:,}", show_bytes(ssd.num_bytes), show_bytes(ssd.max_bytes),
                *[""] * 5, f"{ssd.hits:,}", "",
            )  # fmt: skip
    for engine in stat.engines:
        used_tokens = engine.total_tokens - engine.free_tokens
        table.add_row(
            escape(engine.worker), Tier.HBM.value, "", f"{used_tokens:,} tokens", f"{engine.total_tokens:,} tokens"
        )
    console.print(table)
    if stat.hit_ratio is not None:
        share = f"{stat.hit_ratio:.1%} of {stat.prompt_tokens:,} prompt tokens"
        _say(console, f"found and not computed: {share}, of the requests that ended since the conductors' start")
    for node in stat.nodes:
        if node.pool.pins_refused:
            _warn(console, f"{node.node}: {node.pool.pins_refused:,} chunks are to be pinned, beyond max_pinned_share")
        if node.pool.ssd is not None and node.pool.ssd.failure:
            _warn(console, f"{node.node}: the SSD is left alone: {node.pool.ssd.failure}")
    _failures(console, stat.failed)


def print_flush(console: Console, done: Flushed) -> None:
    table = _table("where", "tier", "chunks", "bytes", "still being read", left=("where", "tier"))
    total = 0
    for node in done.nodes:
        for tier in node.tiers:
            leased = f"{node.num_leased:,}" if tier.tier is Tier.DRAM and node.num_leased else ""
            table.add_row(
                escape(node.node), tier.tier.value, f"{tier.num_chunks:,}", show_bytes(tier.num_bytes), leased
            )
            total += tier.num_chunks
    for worker in done.workers:
        if worker.num_chunks:
            table.add_row(escape(worker.worker), Tier.HBM.value, f"{worker.num_chunks:,}", "", "")
    if table.row_count:
        console.print(table)
    answered = sum(not node.error for node in done.nodes)
    _say(console, f"{total:,} copies flushed on {answered:,} nodes; {done.num_unpinned:,} pins ended")
    _failures(console, {node.node: node.error for node in done.nodes if node.error})
    _failures(console, {worker.worker: worker.error for worker in done.workers if worker.error})


def print_pins(console: Console, done: PinsChanged, word: str) -> None:
    _say(console, f"{done.num_changed:,} chunks {word}; {done.num_pins:,} pins in all")
    if word == "pinned":
        table = _table("node", "kept now", "when they come", "no room", "room for", left=("node",))
        for node in done.nodes:
            if not node.error:
                counts = (node.num_pinned, node.num_absent, node.num_refused, node.max_slots)
                table.add_row(escape(node.node), *(f"{count:,}" for count in counts))
        console.print(table)
    for node in done.nodes:
        if node.num_refused:
            _warn(
                console,
                f"{node.node}: {node.num_refused:,} chunks aren't kept, since at most {node.max_slots:,} slots may be "
                "pinned: unpin others, or raise max_pinned_share",
            )
    _failures(console, {node.node: node.error for node in done.nodes if node.error})


def print_warmed(console: Console, done: Warmed) -> None:
    _say(
        console,
        f"{done.num_done:,} of {done.num_prompts:,} prompts, {done.num_tokens:,} tokens run, in {done.seconds:.1f} s: "
        f"{done.num_new:,} chunks are new, {done.num_there:,} were there",
    )
    if done.num_too_short:
        _say(console, f"{done.num_too_short:,} prompts are shorter than one chunk: nothing of them is kept")
    if done.num_missing:
        _warn(
            console,
            f"{done.num_missing:,} chunks were computed and aren't cached: the pools had no room for them, or have "
            "evicted them again",
        )
    for error in done.errors:
        _warn(console, error)
    if done.num_failed > len(done.errors):
        _warn(console, f"and {done.num_failed - len(done.errors):,} more failed")


@contextmanager
def warming(console: Console, num_prompts: int) -> Iterator[Callable[[Warmed], None]]:
    """A progress bar, and what to tell it."""
    columns = (TextColumn("warming"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TextColumn("{task.fields[found]}"), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("warming", total=num_prompts, found="")

        def show(warmed: Warmed) -> None:
            ended = warmed.num_done + warmed.num_failed + warmed.num_too_short
            failed = f", {warmed.num_failed:,} failed" if warmed.num_failed else ""
            progress.update(task, completed=ended, found=f"{warmed.num_tokens:,} tokens run{failed}")

        yield show


def _ago(passed_ns: int) -> str:
    seconds = max(0, passed_ns) / 1e9
    for length, unit in _UNITS:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _table(*headings: str, left: tuple[str, ...]) -> Table:
    table = Table(header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    return table


def _failures(console: Console, failed: Mapping[NodeId, str] | Mapping[WorkerId, str]) -> None:
    for name, why in failed.items():
        _warn(console, f"{name}: {why}")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _warn(console: Console, text: str) -> None:
    console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
