"""The commands `halfmoon advise kv-size`, `halfmoon advise chunk-size` and `halfmoon record`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from halfmoon.cli.connection import operator_config

advise_app = typer.Typer(help="How much memory KV needs, and which chunk size suits the traffic.", no_args_is_help=True)


class KvDtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float8 = "float8"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"


Dtype = Annotated[KvDtype, typer.Option(help="Element type of the KV; auto: that of the model's weights.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DataDir = Annotated[Path | None, typer.Option(help="Data directory of the system that runs here.")]


@advise_app.command("kv-size")
def kv_size(
    *,
    model: Annotated[Path, typer.Option(help="Hugging Face folder, its config.json, or a GGUF file.")],
    dtype: Dtype = KvDtype.auto,
    context: Annotated[str, typer.Option(help="Lengths in tokens, with commas.")] = "4096,32768,131072",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Ranks that a worker's model is split over.")] = 1,
    arena_bytes: Annotated[str | None, typer.Option(help="A pool's arena, such as 64GiB: what fits in it.")] = None,
    chunk_tokens: Annotated[int, typer.Option(min=1, max=4096, help="Tokens per chunk, for --arena-bytes.")] = 256,
    json: Json = False,
) -> None:
    """The size of a model's KV: bytes per token and per context length. Reads the config alone, no weights.

    halfmoon advise kv-size --model Llama-3.3-70B-Instruct --dtype fp16 --tensor-parallel 4 --arena-bytes 256GiB
    """
    from halfmoon.cli.advise_run import KvOptions, run_kv_size
    from halfmoon.cli.advise_text import parse_bytes, parse_counts

    options = KvOptions(
        model=model,
        dtype=dtype.value,
        contexts=parse_counts(context),
        tensor_parallel=tensor_parallel,
        arena_bytes=None if arena_bytes is None else parse_bytes(arena_bytes),
        chunk_tokens=chunk_tokens,
    )
    raise typer.Exit(run_kv_size(options, Console(), as_json=json))


@advise_app.command("chunk-size")
def chunk_size(
    *,
    trace: Annotated[
        Path | None,
        typer.Option(help="A recording of `halfmoon record`, or a trace of Mooncake (JSONL) or Azure (CSV)."),
    ] = None,
    url: Annotated[str | None, typer.Option(help="NATS of a running system, to record first.")] = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="How long to record, with --url.")] = 10.0,
    sizes: Annotated[str, typer.Option(help="Chunk sizes in tokens, with commas.")] = "64,128,256,512",
    only: Annotated[str | None, typer.Option(help="The model to look at, where a recording has several.")] = None,
    model: Annotated[Path | None, typer.Option(help="As for kv-size: for the bytes of a chunk.")] = None,
    dtype: Dtype = KvDtype.auto,
    kv_bytes_per_token: Annotated[int | None, typer.Option(min=1, help="Instead of --model.")] = None,
    chunk_cost_ms: Annotated[
        float, typer.Option(min=0, help="What a chunk costs beside its bytes and its compute.")
    ] = 1.0,
    prefill_tokens_per_s: Annotated[
        float | None,
        typer.Option(min=1, help="What a prefill worker computes.", show_default="as recorded, else 10000"),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it to this file: .png, .svg or .pdf.")] = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """For each chunk size: prompt tokens reused, records, bytes, transfers, waste; and which size to take.

    halfmoon advise chunk-size --trace requests.jsonl --plot chunks.png

    halfmoon advise chunk-size --url nats://10.0.0.5:4222 --minutes 30
    """
    if (trace is None) == (url is None):
        raise typer.BadParameter("give either --trace FILE or --url NATS_URL")
    from halfmoon.cli.advise_run import ChunkOptions, run_chunk_size
    from halfmoon.cli.advise_text import parse_counts

    options = ChunkOptions(
        sizes=parse_counts(sizes),
        trace=trace,
        minutes=minutes,
        only=only,
        model=model,
        dtype=dtype.value,
        kv_bytes_per_token=kv_bytes_per_token,
        chunk_cost_ms=chunk_cost_ms,
        prefill_tokens_per_s=prefill_tokens_per_s,
        plot=plot,
    )
    raise typer.Exit(run_chunk_size(options, operator_config(url, data_dir), Console(), as_json=json))


def record(
    *,
    out: Annotated[Path, typer.Option(help="A new file, JSON lines.")],
    minutes: Annotated[float, typer.Option(min=0.01, help="How long.")] = 10.0,
    url: Annotated[
        str | None, typer.Option(help="The cluster's NATS.", show_default="HALFMOON_NATS_URL, else this machine's")
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Record the requests of a running system: times, lengths, and hashes that no prompt can be read out of.

    The file is valid at any moment; Ctrl-C ends it early. Format: docs/sizing.md.

    halfmoon record --out requests.jsonl --minutes 60
    """
    from halfmoon.cli.advise_run import run_record

    raise typer.Exit(run_record(operator_config(url, data_dir), out, minutes, Console()))
