"""`halfmoon advise` and `halfmoon record`: from options to an exit code."""

import asyncio
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from halfmoon.cli.advise_record import RecordError, record
from halfmoon.cli.advise_screen import print_chunks, print_kv
from halfmoon.config import CommonConfig
from halfmoon.models import ModelFolderError, read_config
from halfmoon.planner.chunk_advice import Costs, advise_chunks
from halfmoon.planner.kv_advice import KvAdvice, advise_kv
from halfmoon.planner.plot import PlotError, check_plot, draw
from halfmoon.traces import Trace, TraceError, read_trace

EXIT_REFUSED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOptions:
    model: Path
    dtype: str
    contexts: list[int]
    tensor_parallel: int = 1
    arena_bytes: int | None = None
    chunk_tokens: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOptions:
    sizes: list[int]
    trace: Path | None = None
    minutes: float = 10.0
    only: str | None = None
    model: Path | None = None
    dtype: str = "auto"
    kv_bytes_per_token: int | None = None
    chunk_cost_ms: float = 1.0
    prefill_tokens_per_s: float | None = None
    plot: Path | None = None


def run_kv_size(options: KvOptions, console: Console, *, as_json: bool) -> int:
    try:
        advice = _advise_kv(options)
    except (ModelFolderError, ValueError) as error:
        return _refuse("advise kv-size", error)
    if as_json:
        _print_json(advice)
    else:
        print_kv(console, advice)
    return 0


def run_record(config: CommonConfig, out: Path, minutes: float, console: Console) -> int:
    console.print(f"recording to {out} for {minutes:g} minutes; Ctrl-C ends it", highlight=False, markup=False)
    try:
        num_requests = asyncio.run(record(config, out, 60 * minutes, console))
    except RecordError as error:
        return _refuse("record", error)
    console.print(
        f"{num_requests:,} requests in {out}; next: halfmoon advise chunk-size --trace {out}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return 0


def run_chunk_size(options: ChunkOptions, config: CommonConfig, console: Console, *, as_json: bool) -> int:
    """With no trace, a running system is recorded first, into a file that goes with the command."""
    try:
        if options.plot is not None:
            check_plot(options.plot)
        kv_bytes = _kv_bytes_per_token(options)
        trace, source = _trace(options, config, Console(stderr=True))
        of_model = trace.models[0] if trace.models else None
        rate = options.prefill_tokens_per_s or (of_model.prefill_tokens_per_s if of_model else None)
        costs = Costs(chunk_s=options.chunk_cost_ms / 1000)
        if rate is not None:
            costs = Costs(chunk_s=options.chunk_cost_ms / 1000, prefill_tokens_per_s=rate)
        advice = advise_chunks(
            trace.requests,
            block_tokens=trace.block_tokens,
            kv_bytes_per_token=kv_bytes or (of_model.kv_bytes_per_token if of_model else None),
            costs=costs,
            sizes=options.sizes,
        )
        if options.plot is not None:
            draw(advice, options.plot, f"{source}: {advice.num_requests:,} requests")
    except (ModelFolderError, PlotError, RecordError, TraceError, ValueError) as error:
        return _refuse("advise chunk-size", error)
    if as_json:
        _print_json(advice)
        for warning in trace.warnings:
            print(f"halfmoon advise chunk-size: {warning}", file=sys.stderr)
    else:
        print_chunks(console, advice, source, trace.warnings)
        if options.plot is not None:
            console.print(f"drawn: {options.plot}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _trace(options: ChunkOptions, config: CommonConfig, status: Console) -> tuple[Trace, str]:
    if options.trace is not None:
        return read_trace(options.trace, model=options.only), options.trace.name
    with tempfile.TemporaryDirectory(prefix="halfmoon-record-") as folder:
        file = Path(folder) / "requests.jsonl"
        num_requests = asyncio.run(record(config, file, 60 * options.minutes, status))
        if num_requests == 0:
            raise RecordError("no request came while recording: record for longer, or while there is traffic")
        return read_trace(file, model=options.only), "the running system"


def _kv_bytes_per_token(options: ChunkOptions) -> int | None:
    if options.kv_bytes_per_token is not None or options.model is None:
        return options.kv_bytes_per_token
    return _advise_kv(KvOptions(model=options.model, dtype=options.dtype, contexts=[])).bytes_per_token


def _advise_kv(options: KvOptions) -> KvAdvice:
    config = read_config(options.model)
    try:
        return advise_kv(
            config,
            dtype=options.dtype,
            contexts=options.contexts,
            tensor_parallel=options.tensor_parallel,
            arena_bytes=options.arena_bytes,
            chunk_tokens=options.chunk_tokens,
        )
    except ValueError as error:
        raise ModelFolderError(f"{options.model}: {error}") from None


def _print_json(advice: msgspec.Struct) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(advice), indent=2).decode() + "\n")


def _refuse(command: str, error: Exception) -> int:
    Console(stderr=True).print(
        f"halfmoon {command}: {error}", style="red", markup=False, highlight=False, soft_wrap=True
    )
    return EXIT_REFUSED
