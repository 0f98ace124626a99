"""The commands `halfmoon cache ls`, `stat`, `pin`, `unpin`, `flush` and `warm`."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from halfmoon.cli.connection import operator_config

cache_app = typer.Typer(
    help="Look at the cluster's KV cache, keep parts of it, throw parts away, and fill it ahead of traffic.",
    no_args_is_help=True,
)


class TierName(StrEnum):
    dram = "dram"
    ssd = "ssd"


class SortName(StrEnum):
    hits = "hits"
    size = "size"
    age = "age"
    idle = "idle"
    key = "key"


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DataDir = Annotated[Path | None, typer.Option(help="Data directory of the system that runs here.")]
NatsUrl = Annotated[
    str | None, typer.Option(help="The cluster's NATS.", show_default="HALFMOON_NATS_URL, else this machine's")
]
Model = Annotated[str | None, typer.Option(help="The served model that is meant.", show_default="the only one")]
Tenant = Annotated[str, typer.Option(help="Whose cache: prompts of different tenants have different chunks.")]
Prompts = Annotated[
    list[Path] | None,
    typer.Argument(
        help="Prompts: a text file is one; each line of a .jsonl file is one, as chat messages, or an object with "
        "`messages`, `prompt` or `tokens`. - reads text from standard input.",
        show_default=False,
    ),
]
Keys = Annotated[list[str] | None, typer.Option("--key", help="A chunk's key in hex, as `ls` shows. Repeatable.")]


@cache_app.command("ls")
def ls(
    *,
    tenant: Annotated[str | None, typer.Option(help="Only what was computed for this tenant.")] = None,
    model: Annotated[str | None, typer.Option(help="Only this model's.")] = None,
    node: Annotated[list[str] | None, typer.Option(help="Only on this node. Repeatable.")] = None,
    tier: Annotated[TierName | None, typer.Option(help="Only in this tier.")] = None,
    prefixes: Annotated[
        bool, typer.Option("--prefixes", help="One row per cached prefix (its last chunk) instead of per chunk.")
    ] = False,
    sort: Annotated[SortName, typer.Option(help="By what; `key` is the order in which one can page.")] = SortName.hits,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Rows, at most.")] = 40,
    after: Annotated[str | None, typer.Option(help="With --sort key: go on after this key.")] = None,
    json: Json = False,
    nats_url: NatsUrl = None,
    data_dir: DataDir = None,
) -> None:
    """List cached chunks, or prefixes: where they are, in which tier, how often and how long ago they were used.

    halfmoon cache ls                                     the 40 most used chunks

    halfmoon cache ls --prefixes --tenant acme --sort idle

    halfmoon cache ls --sort key --limit 1000 --json      the first page of all; `next` is the --after of the second

    Keys are hashes: no prompt can be read out of them, and none is stored.
    """
    from halfmoon.cli.cache_run import LsOptions, run_ls

    if after is not None and sort is not SortName.key:
        raise typer.BadParameter("--after goes with --sort key")
    options = LsOptions(
        tenant=tenant,
        model=model,
        nodes=tuple(node or ()),
        tier=None if tier is None else tier.value,
        ends_only=prefixes,
        sort=sort.value,
        limit=limit,
        after=after,
    )
    raise typer.Exit(run_ls(options, operator_config(nats_url, data_dir), Console(), as_json=json))


@cache_app.command("stat")
def stat(*, json: Json = False, nats_url: NatsUrl = None, data_dir: DataDir = None) -> None:
    """Show what each node's tiers hold, how full they are, and which share of the chunks asked for was found.

    Slots: free, staged (being written), ready, leased (being read), pinned; together all there are. A slot that is
    pinned and leased counts as pinned.

    halfmoon cache stat

    HALFMOON_NATS_URL=nats://10.0.0.5:4222 halfmoon cache stat --json
    """
    from halfmoon.cli.cache_run import run_stat

    raise typer.Exit(run_stat(operator_config(nats_url, data_dir), Console(), as_json=json))


@cache_app.command("pin")
def pin(
    prompts: Prompts = None,
    *,
    key: Keys = None,
    tenant: Tenant = "default",
    model: Model = None,
    json: Json = False,
    nats_url: NatsUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Keep the chunks of these prompts: on every node that has them, now or later, until they are unpinned.

    What isn't cached yet is pinned when it comes: `halfmoon cache warm` brings it. Each node pins a bounded share of
    its slots (max_pinned_share); exit code 1 where some chunks found no room there.

    halfmoon cache pin system_prompt.txt

    halfmoon cache pin --tenant acme conversations.jsonl

    halfmoon cache pin --key 3f09c4…(64 digits)
    """
    from halfmoon.cli.cache_run import PromptOptions, run_pin

    options = PromptOptions(files=tuple(prompts or ()), keys=tuple(key or ()), tenant=tenant, model=model)
    if not options.files and not options.keys:
        raise typer.BadParameter("name prompts to pin, or a --key")
    raise typer.Exit(run_pin(options, operator_config(nats_url, data_dir), Console(), as_json=json))


@cache_app.command("unpin")
def unpin(
    prompts: Prompts = None,
    *,
    key: Keys = None,
    everything: Annotated[bool, typer.Option("--all", help="Every pin there is.")] = False,
    tenant: Tenant = "default",
    model: Model = None,
    json: Json = False,
    nats_url: NatsUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Let eviction take these chunks again. What is cached of them stays, for as long as it is worth its place.

    halfmoon cache unpin system_prompt.txt

    halfmoon cache unpin --all
    """
    from halfmoon.cli.cache_run import PromptOptions, run_unpin

    options = PromptOptions(files=tuple(prompts or ()), keys=tuple(key or ()), tenant=tenant, model=model)
    if everything == bool(options.files or options.keys):
        raise typer.BadParameter("name prompts or a --key to unpin, or --all")
    raise typer.Exit(
        run_unpin(options, operator_config(nats_url, data_dir), Console(), as_json=json, everything=everything)
    )


@cache_app.command("flush")
def flush(
    *,
    tenant: Annotated[str | None, typer.Option(help="What was computed for this tenant.")] = None,
    model: Annotated[str | None, typer.Option(help="What this model computed.")] = None,
    prefix: Annotated[
        list[Path] | None,
        typer.Option(help="Prompts in a file, as for `pin`: their chunks, and all that follow them. Repeatable."),
    ] = None,
    key: Annotated[
        list[str] | None, typer.Option(help="A chunk's key in hex: it, and all that follow it. Repeatable.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="The whole cache.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
    json: Json = False,
    nats_url: NatsUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Throw cached KV away, in every tier of every node and in the engines' own caches. Requests in flight go on.

    Conditions add up: --tenant with --model means that tenant's chunks of that model. Pins of what is flushed end. A
    node that is away makes up for it when it is heard again; the exit code is 1 then.

    halfmoon cache flush --tenant acme

    halfmoon cache flush --model SmolLM2-135M-Instruct --yes

    halfmoon cache flush --prefix contract.txt --tenant acme

    halfmoon cache flush --all
    """
    from halfmoon.cli.cache_run import FlushOptions, run_flush

    options = FlushOptions(
        tenant=tenant, model=model, prefixes=tuple(prefix or ()), keys=tuple(key or ()), everything=everything
    )
    if everything == options.has_conditions:
        raise typer.BadParameter("say what: --tenant, --model, --prefix or --key; or --all")
    if not yes and not sys.stdin.isatty():
        raise typer.BadParameter("there is nobody to ask: add --yes")
    if not yes:
        typer.confirm(f"Throw away {options.words()}?", abort=True, err=True)
    raise typer.Exit(run_flush(options, operator_config(nats_url, data_dir), Console(), as_json=json))


@cache_app.command("warm")
def warm(
    prompts: Annotated[
        Path,
        typer.Argument(
            help="A text file with a prompt on each line; or .jsonl, where each line is chat messages, or an object "
            "with `messages`, `prompt` or `tokens`. - reads lines from standard input.",
            show_default=False,
        ),
    ],
    *,
    whole: Annotated[bool, typer.Option("--whole", help="The text file is one prompt.")] = False,
    tenant: Tenant = "default",
    model: Model = None,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Prompts at a time.")] = 4,
    timeout_s: Annotated[float, typer.Option(min=1, help="How long one prompt may take.")] = 300.0,
    service_class: Annotated[str, typer.Option(help="Class of service that the prompts run in.")] = "batch",
    json: Json = False,
    nats_url: NatsUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Fill the cache ahead of traffic: each prompt is prefilled, behind requests of interactive classes.

    A prompt whose chunks are all there isn't run. Exit code 1 where some prompts failed, or found no room.

    halfmoon cache warm questions.txt

    halfmoon cache warm --whole system_prompt.txt && halfmoon cache pin system_prompt.txt

    halfmoon cache warm --tenant acme --concurrency 16 conversations.jsonl
    """
    from halfmoon.cli.cache_run import WarmOptions, run_warm

    options = WarmOptions(
        file=prompts,
        is_whole=whole,
        tenant=tenant,
        model=model,
        concurrency=concurrency,
        timeout_s=timeout_s,
        service_class=service_class,
    )
    raise typer.Exit(run_warm(options, operator_config(nats_url, data_dir), Console(), as_json=json))
