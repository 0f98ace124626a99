"""The `halfmoon` command."""

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from halfmoon.cli.advise import advise_app, record
from halfmoon.cli.cache import cache_app
from halfmoon.cli.connection import operator_config
from halfmoon.cli.sim import sim_app

app = typer.Typer(
    name="halfmoon",
    help="LLM serving with prefill and decode apart, and one KV cache for the whole cluster.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Get and inspect models.", no_args_is_help=True)
app.add_typer(model_app, name="model")
app.add_typer(advise_app, name="advise")
app.add_typer(cache_app, name="cache")
app.add_typer(sim_app, name="sim")
app.command()(record)


class EngineName(StrEnum):
    torch = "torch"
    vllm = "vllm"
    sim = "sim"


class TransportName(StrEnum):
    auto = "auto"
    tcp = "tcp"
    rdma = "rdma"


class ServiceName(StrEnum):
    gateway = "gateway"
    conductor = "conductor"
    prefill = "prefill"
    decode = "decode"
    kv_tier = "kv-tier"
    registry = "registry"


DataDir = Annotated[
    Path | None, typer.Option(help="Where data, logs and traces go.", show_default="~/.local/share/halfmoon")
]


@app.command()
def up(
    *,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers (colocated ones with --colocated).")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="KV pools: each is one host of a cluster, on this machine.")] = 2,
    engine: Annotated[
        EngineName, typer.Option(help="torch and vllm run the model (docs/engines.md); sim only keeps its time.")
    ] = EngineName.torch,
    model: Annotated[
        Path | None,
        typer.Option(help="Hugging Face folder or GGUF file.", show_default="SmolLM2-135M-Instruct, fetched once"),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the OpenAI-compatible gateway.")] = 8000,
    data_dir: DataDir = None,
    chunk_tokens: Annotated[int, typer.Option(min=1, max=4096, help="Tokens per chunk of KV.")] = 256,
    arena_mib: Annotated[int, typer.Option(min=1, help="Shared memory per node for KV, in MiB.")] = 1024,
    ssd_mib: Annotated[
        int, typer.Option(min=0, help="Disk per node for KV that DRAM has no room for, in MiB; 0 for none.")
    ] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads per engine.", show_default="cores / engines")
    ] = None,
    transport: Annotated[
        TransportName, typer.Option(help="auto: shared memory between the nodes; tcp, rdma: as if they were apart.")
    ] = TransportName.auto,
    colocated: Annotated[bool, typer.Option("--colocated", help="Prefill and decode on the same worker.")] = False,
    drain_timeout_s: Annotated[
        float | None, typer.Option(min=0, help="At a stop, how long requests may take to end.", show_default="30")
    ] = None,
) -> None:
    """Run the whole system on this machine: broker, metadata store, and every service as a process of its own.

    Prints `ready` once a real generation has passed end to end. Ctrl-C drains and stops everything.

    halfmoon up --prefill 2 --decode 1        two prefill workers share one decode worker

    halfmoon up --engine vllm                 the engine for production; its start takes a minute on a CPU

    halfmoon up --engine sim                  no model is run: for trying out control alone

    halfmoon up --model ~/models/Qwen3-0.6B   any model that the engine can page
    """
    from halfmoon.cli.models import resolve_model
    from halfmoon.cli.up.command import run_up
    from halfmoon.cli.up.plan import UpOptions
    from halfmoon.cli.up.screen import UpConsole
    from halfmoon.engine.installed import missing

    console = UpConsole()
    if (what := missing(engine.value)) is not None:
        console.print(f"halfmoon up: {what}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2)
    common = operator_config(None, data_dir)
    folder, name = resolve_model(model, common, console, needs_weights=engine is not EngineName.sim)
    options = UpOptions(
        model=folder,
        model_name=name,
        data_dir=common.data_dir.absolute(),
        port=port,
        num_prefill=prefill,
        num_decode=decode,
        num_nodes=nodes,
        engine=engine.value,
        colocated=colocated,
        chunk_tokens=chunk_tokens,
        arena_bytes=arena_mib << 20,
        ssd_bytes=ssd_mib << 20,
        threads=threads,
        transport=transport.value,
        num_cores=len(os.sched_getaffinity(0)),
        drain_timeout_s=common.drain_timeout_s if drain_timeout_s is None else drain_timeout_s,
    )
    raise typer.Exit(run_up(options, console))


@app.command()
def run(service: Annotated[ServiceName, typer.Argument(help="Which service.")]) -> None:
    """Run one service in the foreground, against the NATS and etcd that its settings name.

    Settings come from HALFMOON_… variables and the TOML file named by HALFMOON_CONFIG: `halfmoon settings SERVICE`
    lists them. SIGTERM drains, then stops.

    HALFMOON_NATS_URL=nats://10.0.0.5:4222 halfmoon run conductor
    """
    os.execv(sys.executable, [sys.executable, "-m", f"halfmoon.{service.name}"])


@app.command()
def settings(
    service: Annotated[ServiceName | None, typer.Argument(help="Which service; all without it.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the reference page of the docs.")] = False,
) -> None:
    """List the settings of a service: variable, type, default, meaning."""
    from halfmoon.cli.settings import markdown_page, print_tables

    if markdown:
        typer.echo(markdown_page(), nl=False)
    else:
        print_tables(Console(), None if service is None else service.name)


@app.command()
def messages() -> None:
    """Print the messages and subjects as an AsyncAPI document (YAML), generated from the code."""
    from halfmoon.cli.asyncapi import document

    typer.echo(document(), nl=False)


@app.command()
def trace(
    request_id: Annotated[
        str | None, typer.Argument(help="As in the x-request-id header; without it, the latest.")
    ] = None,
    data_dir: DataDir = None,
    width: Annotated[int | None, typer.Option(min=60, help="Columns.", show_default="the terminal's")] = None,
) -> None:
    """Show the waterfall of one request: queue, prefill, every chunk of KV and where it came from, decode, TTFT.

    Reads the local store of this machine, which the services write as they work.
    """
    from halfmoon.cli.trace import print_trace

    common = operator_config(None, data_dir)
    raise typer.Exit(print_trace(Console(), common.data_dir / "traces.db", request_id, width))


@app.command()
def doctor(
    *,
    json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
    measure: Annotated[
        bool, typer.Option(help="Let each node read from each other, by every transport, for a second at most.")
    ] = True,
    nats_url: Annotated[
        str | None, typer.Option(help="The cluster's NATS.", show_default="HALFMOON_NATS_URL, else this machine's")
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Look at a running cluster: broker, registry, members, clocks, memory, and how its nodes read from each other.

    For each pair of nodes: which transports there are, which is chosen, why not the others, and the measured GB/s.
    Exit code 1 where something is broken, such as a pair without any way.

    halfmoon doctor                                       the system that runs on this machine

    HALFMOON_NATS_URL=nats://10.0.0.5:4222 halfmoon doctor --json
    """
    from halfmoon.cli.doctor.command import run_doctor
    from halfmoon.cli.doctor.examine import Effort

    effort = Effort() if measure else Effort(probe_bytes=0)
    raise typer.Exit(run_doctor(operator_config(nats_url, data_dir), effort, Console(), as_json=json))


@app.command()
def top(
    *,
    once: Annotated[bool, typer.Option("--once", help="Print what there is after a second, and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
    interval_s: Annotated[float, typer.Option(min=0.1, help="Time between two looks.")] = 0.5,
    nats_url: Annotated[
        str | None, typer.Option(help="The cluster's NATS.", show_default="HALFMOON_NATS_URL, else this machine's")
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Watch a running system: requests a second and how many tokens were cached, times predicted and measured, each
    worker's queue, batch and free KV, each node's pool, and what the conductors have learned of all speeds.

    halfmoon top                       until Ctrl-C

    halfmoon top --once --json         for scripts
    """
    from halfmoon.cli.top import run_top

    raise typer.Exit(
        run_top(operator_config(nats_url, data_dir), Console(), once=once, as_json=json, interval_s=interval_s)
    )


@model_app.command("fetch")
def fetch(data_dir: DataDir = None) -> None:
    """Get the default model, SmolLM2-135M-Instruct: 94 MB to download, 540 MB on disk. Done once."""
    from halfmoon.cli.models import resolve_model

    console = Console()
    folder, _ = resolve_model(None, operator_config(None, data_dir), console)
    console.print(str(folder), markup=False, highlight=False)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
