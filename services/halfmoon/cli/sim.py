"""`halfmoon sim`: what the policies would do with recorded traffic."""

import json
from pathlib import Path
from typing import Annotated

import typer

from halfmoon.eviction import PolicyName, make_policy
from halfmoon.sim.hit_rate import HitCount, replay, replay_belady
from halfmoon.sim.trace import read_prompts
from halfmoon.traces import TraceError

sim_app = typer.Typer(help="Replay recorded traffic against the system's own policies.", no_args_is_help=True)

_BELADY = "belady"
_POLICIES = (*PolicyName, _BELADY)


@sim_app.callback()
def _group() -> None:
    """Replay recorded traffic against the system's own policies."""


@sim_app.command("hit-rate")
def hit_rate(
    trace: Annotated[Path, typer.Argument(help="A trace with blocks: Mooncake's, or a recording; plain or .xz.")],
    policy: Annotated[
        str, typer.Option(help=f"One of {', '.join(_POLICIES)}; belady is the optimum, which knows the future.")
    ] = PolicyName.PREFIX_AWARE,
    blocks: Annotated[
        int | None, typer.Option(min=1, help="How many blocks the pool holds.", show_default="all that come")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate how often a pool of N blocks, empty at first, would have had a prompt's blocks when it came.

    halfmoon sim hit-rate conversation_trace.jsonl --policy lru --blocks 10000 --json
    """
    if policy not in _POLICIES:
        raise _refused(f"there is no policy {policy!r}: expected one of {', '.join(_POLICIES)}")
    try:
        prompts = read_prompts(trace)
    except TraceError as error:
        raise _refused(str(error)) from None
    if blocks is None:
        count = replay(prompts, None, None)
    elif policy == _BELADY:
        count = replay_belady(prompts, blocks)
    else:
        count = replay(prompts, make_policy(PolicyName(policy), blocks, int), blocks)
    typer.echo(json.dumps(_record(policy, blocks, count)) if as_json else _sentence(policy, blocks, count))


def _record(policy: str, blocks: int | None, count: HitCount) -> dict[str, str | int | float | None]:
    return {
        "policy": policy,
        "blocks": blocks,
        "references": count.references,
        "unique": count.unique,
        "hit_ratio": round(count.hit_ratio, 4),
        "prefix_hit_ratio": round(count.prefix_hit_ratio, 4),
    }


def _sentence(policy: str, blocks: int | None, count: HitCount) -> str:
    pool = "a pool without bounds" if blocks is None else f"{blocks:,} blocks under {policy}"
    return (
        f"simulated, {pool}: {count.hits:,} of {count.references:,} blocks hit ({count.hit_ratio:.4f}), "
        f"{count.prefix_hits:,} with their whole prefix ({count.prefix_hit_ratio:.4f}); {count.unique:,} are different"
    )


def _refused(message: str) -> typer.Exit:
    typer.echo(f"halfmoon sim: {message}", err=True)
    return typer.Exit(2)
