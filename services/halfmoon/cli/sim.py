"""`halfmoon sim`: what the policies would do with recorded traffic."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from halfmoon.cli.sim_run import Assumed, Shown, run_sim
from halfmoon.eviction import PolicyName, make_policy
from halfmoon.scheduling.policies import PolicyName as Scheduling
from halfmoon.scheduling.slo import AdmissionName
from halfmoon.sim.arrivals import Arrivals
from halfmoon.sim.hit_rate import HitCount, replay, replay_belady
from halfmoon.sim.options import SimOptions
from halfmoon.sim.prefetch import replay_prefetch
from halfmoon.sim.profiles.hardware import HARDWARE
from halfmoon.sim.profiles.measured import MEASURED
from halfmoon.sim.profiles.models import CONFIGS
from halfmoon.sim.tally import Slo
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


@sim_app.command("run")
def run(
    trace: Annotated[Path, typer.Argument(help="Mooncake's JSON lines, Azure's CSV or a recording; plain or .xz.")],
    *,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill instances.")] = 8,
    decode: Annotated[int, typer.Option(min=0, help="Decode instances.")] = 8,
    colocated: Annotated[int, typer.Option(min=0, help="Instances that do both, in place of the others.")] = 0,
    policy: Annotated[Scheduling, typer.Option(help="How requests are placed.")] = Scheduling.KV_CENTRIC,
    threshold: Annotated[
        float | None, typer.Option(help="Balancing threshold of kv_centric.", show_default="tunes itself")
    ] = None,
    admission: Annotated[AdmissionName, typer.Option(help="Who is turned away at arrival.")] = AdmissionName.NONE,
    second_look: Annotated[
        bool, typer.Option("--second-look", help="Decode turns away what would break the TBT limit when its KV came.")
    ] = False,
    slo_ttft: Annotated[float | None, typer.Option(min=0, help="Seconds to the first token at most.")] = None,
    slo_tbt: Annotated[float | None, typer.Option(min=0, help="Seconds between tokens at most, on average.")] = None,
    model: Annotated[
        str, typer.Option(help=f"{', '.join(CONFIGS)}; or a config.json or Hugging Face folder.")
    ] = "llama2-70b",
    dtype: Annotated[str, typer.Option(help="Of weights and KV.")] = "bfloat16",
    hardware: Annotated[
        str, typer.Option(help=f"{', '.join(HARDWARE)}; or {MEASURED}: as a recording's workers measured.")
    ] = "A800",
    gpus: Annotated[int | None, typer.Option(min=1, help="Per instance.", show_default="8")] = None,
    cache_tokens: Annotated[
        int | None, typer.Option(min=0, help="Of each node's pool.", show_default="what the hardware's DRAM holds")
    ] = None,
    eviction: Annotated[PolicyName, typer.Option(help="Of the pools.")] = PolicyName.PREFIX_AWARE,
    chunk_tokens: Annotated[
        int | None, typer.Option(min=1, help="A multiple of the trace's blocks.", show_default="the trace's blocks")
    ] = None,
    index_lag: Annotated[float, typer.Option(min=0, help="Seconds until the index hears of a chunk.")] = 0.002,
    step_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step of a colocated instance.")] = 2048,
    max_waiting: Annotated[int, typer.Option(min=1, help="Requests in one worker's queue.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="What clients ask for at least.")] = 2048,
    join: Annotated[list[float] | None, typer.Option(min=0, help="Seconds; one more prefill instance.")] = None,
    speed: Annotated[float, typer.Option(min=0.01, help="2: all comes in half the time.")] = 1.0,
    repeat: Annotated[int, typer.Option(min=1, help="The trace so many times over, with other prompts.")] = 1,
    requests: Annotated[int | None, typer.Option(min=1, help="Only so many.")] = None,
    begin: Annotated[float, typer.Option(min=0, help="Leave out so many seconds of the trace.")] = 0.0,
    seconds: Annotated[float | None, typer.Option(min=0, help="Only this stretch of the trace.")] = None,
    only: Annotated[str | None, typer.Option(help="One model's requests, of a recording.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same result.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[Path | None, typer.Option(help="A folder for pictures.")] = None,
) -> None:
    """Simulate a cluster that serves a trace: latencies, reuse, load, rejections. See docs/simulator.md.

    halfmoon sim run conversation_trace.jsonl --prefill 8 --decode 8 --policy kv_centric --json
    """
    arrivals = Arrivals(
        path=trace,
        speed=speed,
        repeat=repeat,
        limit=requests,
        begin_s=begin,
        seconds=seconds,
        chunk_tokens=chunk_tokens,
        max_tokens=max_tokens,
        only=only,
    )
    options = SimOptions(
        prefill=prefill,
        decode=decode,
        colocated=colocated,
        policy=policy,
        balancing_threshold=threshold,
        admission=admission,
        slo=Slo(slo_ttft, slo_tbt),
        second_look=second_look,
        seed=seed,
        cache_tokens=cache_tokens,
        eviction=eviction,
        index_lag_s=index_lag,
        step_tokens=step_tokens,
        max_waiting=max_waiting,
        joins_s=tuple(join or ()),
    )
    assumed = Assumed(model=model, hardware=hardware, dtype=dtype, gpus=gpus)
    raise typer.Exit(run_sim(arrivals, options, assumed, Shown(as_json=as_json, plot=plot)))


@sim_app.command("prefetch")
def prefetch(
    trace: Annotated[Path, typer.Argument(help="A trace with blocks: Mooncake's, or a recording; plain or .xz.")],
    confidence: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="How likely a block must be to follow; 1 prefetches nothing.")
    ] = 0.9,
    nodes: Annotated[int, typer.Option(min=1, help="How many pools there are.")] = 4,
    blocks: Annotated[int, typer.Option(min=1, help="How many blocks each pool holds.")] = 3000,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate what prefetching at this confidence would bring to the pools, and how much of it would be used.

    halfmoon sim prefetch conversation_trace.jsonl --confidence 0.7
    """
    try:
        prompts = read_prompts(trace)
    except TraceError as error:
        raise _refused(str(error)) from None
    count = replay_prefetch(prompts, num_nodes=nodes, capacity=blocks, confidence=confidence)
    if as_json:
        typer.echo(json.dumps({"nodes": nodes, "blocks": blocks, "confidence": confidence, **asdict(count)}))
        return
    typer.echo(
        f"simulated, {nodes} pools of {blocks:,} blocks under lru: of {count.references:,} blocks "
        f"{count.local / count.references:.4f} were held where the prompt went, {count.remote / count.references:.4f} "
        f"elsewhere; {count.prefetched:,} prefetched, of which {count.used:,} were used and {count.wasted:,} evicted "
        "unused"
    )


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
