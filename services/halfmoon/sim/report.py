"""What a simulation came to: one record with stable keys, documented in docs/simulator.md."""

from collections.abc import Sequence
from typing import Any

from halfmoon.sim.arrivals import Arrivals
from halfmoon.sim.simulation import Simulation


def record(simulation: Simulation, arrivals: Arrivals) -> dict[str, Any]:
    """For `--json`. Times are in seconds, of virtual time."""
    tally, options = simulation.tally, simulation.options
    span_s = tally.last_end_s
    busy = _busy(simulation)
    mean_s = sum(busy) / len(busy)
    return {
        "simulated": True,
        "trace": arrivals.path.name,
        "policy": options.policy.value,
        "admission": options.admission.value,
        "model": simulation.machine.model,
        "hardware": simulation.machine.hardware,
        "seed": options.seed,
        "speed": arrivals.speed,
        "instances": _instances(simulation),
        "num_requests": tally.num_requests,
        "num_finished": tally.num_finished,
        "ttft_s": tally.ttft_s.summary(),
        "tbt_s": tally.tbt_s.summary(),
        "e2e_s": tally.e2e_s.summary(),
        "prompt_s": tally.prefill_s.summary(),
        "request_tbt_s": tally.mean_tbt_s.summary(),
        "slo": {"ttft_s": options.slo.ttft_s, "tbt_s": options.slo.tbt_s},
        "slo_attainment": _share(tally.num_good, tally.num_requests),
        "goodput_rps": _share(tally.num_good, span_s),
        "hit_ratio": _share(tally.reused_tokens, tally.prompt_tokens),
        "rejected": tally.num_rejected,
        "wasted_prefills": tally.num_wasted,
        "bytes_moved": tally.bytes_pulled + tally.bytes_handed_over + tally.bytes_replicated,
        "bytes_moved_for": {
            "prefixes": tally.bytes_pulled,
            "handover": tally.bytes_handed_over,
            "copies": tally.bytes_replicated,
        },
        "stale_prefixes": tally.num_stale,
        "prefill_compute_s": round(tally.compute_s, 3),
        "load_max_over_mean": round(max(busy) / mean_s, 4) if mean_s else None,
        "duration_s": round(span_s, 3),
        "load": simulation.load.columns(),
        "assumptions": assumptions(simulation, arrivals),
    }


def assumptions(simulation: Simulation, arrivals: Arrivals) -> list[str]:
    """What the figures rest on, for whoever reads them."""
    options, machine, timing = simulation.options, simulation.machine, simulation.machine.timing
    cache = machine.cache_tokens if options.cache_tokens is None else options.cache_tokens
    found = [
        "simulated: no model ran; times are a roofline's",
        f"{machine.model} on {machine.hardware} an instance: a prompt of 8,192 tokens takes "
        f"{timing.prefill_s(8192):.3f} s, a step of 16 such sequences {timing.step_s(16, 131072):.4f} s",
        *machine.assumptions,
        f"a pool of {cache:,} tokens on each node that prefills, empty at first, under {options.eviction.value}; "
        f"chunks of {simulation.chunk_tokens} tokens, partial ones never reused",
        f"NICs carry {machine.nic_bytes_per_s / 1e9:.1f} GB/s each way, one transfer after the other",
        f"policies are told the model's own times; the index hears of chunks after {options.index_lag_s * 1000:g} ms",
        "schedulers don't know how long completions get",
    ]
    if options.colocated:
        found.append(f"colocated instances: steps of {options.step_tokens} tokens, each with a cache of its own")
    else:
        found.append("KV goes to decode while it is computed; the first token is decode's")
    if arrivals.speed != 1:
        found.append(f"requests come {arrivals.speed:g} times as fast as in the trace")
    if arrivals.repeat > 1:
        found.append(f"the trace {arrivals.repeat} times over, each time with other prompts")
    return found


def sentences(found: dict[str, Any]) -> Sequence[str]:
    """The record for a person."""

    def spread(name: str) -> str:
        each = found[name]
        if each["mean"] is None:
            return "none"
        return f"mean {each['mean']:.3f} s, p50 {each['p50']:.3f}, p90 {each['p90']:.3f}, p99 {each['p99']:.3f}"

    def share(value: float | None) -> str:
        return "none" if value is None else f"{value:.1%}"

    return (
        f"simulated: {found['num_requests']:,} requests of {found['trace']} on {found['instances']}, "
        f"{found['policy']}, admission {found['admission']}",
        f"TTFT   {spread('ttft_s')}",
        f"TBT    {spread('tbt_s')}",
        f"E2E    {spread('e2e_s')}",
        f"within the SLO {share(found['slo_attainment'])}, goodput {found['goodput_rps'] or 0:.3f} requests/s",
        f"prompt tokens reused {share(found['hit_ratio'])}; {found['bytes_moved'] / 1e9:,.1f} GB moved",
        f"rejected {found['rejected']:,}, prefills wasted {found['wasted_prefills']:,}",
        f"the busiest instance did {found['load_max_over_mean'] or 0:.2f} times the mean",
    )


def _busy(simulation: Simulation) -> list[float]:
    """Seconds of work, of each instance that prefills."""
    cluster = simulation.cluster
    return [each.busy_s for each in (cluster.colocated or cluster.prefills).values()]


def _instances(simulation: Simulation) -> str:
    cluster = simulation.cluster
    if cluster.colocated:
        return f"{len(cluster.colocated)} colocated"
    return f"{len(cluster.prefills)} prefill, {len(cluster.decodes)} decode"


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 6) if whole else None
