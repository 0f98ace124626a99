"""Redoes the experiments of published papers in the simulator; writes docs/results.md, our figures beside theirs.

`make results`, or `python -m benchmarks.results`: 28 simulations, two at a time, 2 to 15 s each, so two minutes on two
idle cores. `… policies overload` runs these groups alone, and takes the others from docs/results.json, where the
figures of the last runs are.
"""

import json
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results_page import page
from halfmoon.scheduling.policies import PolicyName
from halfmoon.scheduling.slo import AdmissionName
from halfmoon.sim.arrivals import Arrivals
from halfmoon.sim.options import SimOptions
from halfmoon.sim.plot import series
from halfmoon.sim.profiles.hardware import hardware_profile
from halfmoon.sim.profiles.machine import machine
from halfmoon.sim.profiles.models import model_profile
from halfmoon.sim.report import record
from halfmoon.sim.simulation import Simulation
from halfmoon.sim.tally import Slo

ROOT = Path(__file__).parents[1]
TRACES = ROOT / "tests" / "data" / "mooncake"
FIGURES = ROOT / "docs" / "results.json"
PAGE = ROOT / "docs" / "results.md"
LOAD_PICTURE = ROOT / "docs" / "results-load.svg"

MODEL, HARDWARE = "llama2-70b", "A800"
MOONCAKE_SLO = Slo(30.0, 0.1)
OVERLOAD_SLO = Slo(30.0, 0.04)
NO_BOUND = 1_000_000
SPEEDS_APART = (2.0, 2.25, 2.5, 2.75, 3.0)
SPEEDS_COLOCATED = (1.25, 1.5, 1.75, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    name: str
    trace: str = "conversation"
    speed: float = 1.0
    limit: int | None = None
    options: SimOptions = field(default_factory=SimOptions)


def policies() -> Iterable[Experiment]:
    """Mean TTFT by policy, 8 + 8 instances; and at the load where random placing waits as long as theirs did."""
    for speed in (1.0, 1.25):
        for policy in (
            PolicyName.RANDOM,
            PolicyName.LEAST_LOADED,
            PolicyName.PREFIX_AFFINITY,
            PolicyName.KV_CENTRIC,
        ):
            options = SimOptions(policy=policy, max_waiting=NO_BOUND)
            yield Experiment(name=f"policies {policy} {speed:g}", speed=speed, options=options)


def overload() -> Iterable[Experiment]:
    """Twice as fast as recorded: who is turned away, and when."""
    for name, admission, judges_tbt in (
        ("none", AdmissionName.EARLY, False),
        ("early", AdmissionName.EARLY, True),
        ("predictive", AdmissionName.PREDICTIVE, True),
    ):
        options = SimOptions(decode=1, admission=admission, judges_tbt=judges_tbt, second_look=True, slo=OVERLOAD_SLO)
        yield Experiment(name=f"overload {name}", speed=2.0, options=options)


def colocated() -> Iterable[Experiment]:
    """How much faster the trace may come until a tenth of the requests miss the limits."""
    apart = SimOptions(prefill=12, decode=4, slo=MOONCAKE_SLO, max_waiting=NO_BOUND)
    both = SimOptions(colocated=16, policy=PolicyName.LEAST_LOADED, slo=MOONCAKE_SLO, max_waiting=NO_BOUND)
    for speed in SPEEDS_APART:
        yield Experiment(name=f"colocated apart {speed:g}", speed=speed, limit=3000, options=apart)
    for speed in SPEEDS_COLOCATED:
        yield Experiment(name=f"colocated both {speed:g}", speed=speed, limit=3000, options=both)


def pools() -> Iterable[Experiment]:
    """One pool for all against ten of their own."""
    for trace in ("conversation", "synthetic"):
        for policy in (PolicyName.RANDOM, PolicyName.PREFIX_AFFINITY, PolicyName.KV_CENTRIC):
            options = SimOptions(prefill=10, decode=10, policy=policy, cache_tokens=3_000_000, max_waiting=NO_BOUND)
            yield Experiment(name=f"pools {trace} {policy}", trace=trace, options=options)


def reuse() -> Iterable[Experiment]:
    """Eight caches of 8.4M tokens: what Dynamo's replay has."""
    for policy in (PolicyName.ROUND_ROBIN, PolicyName.KV_CENTRIC):
        options = SimOptions(policy=policy, cache_tokens=8_400_000, max_waiting=NO_BOUND)
        yield Experiment(name=f"reuse {policy}", options=options)


GROUPS = {
    "policies": policies,
    "overload": overload,
    "colocated": colocated,
    "pools": pools,
    "reuse": reuse,
}


def run(experiment: Experiment) -> dict[str, Any]:
    """One record, without what takes much room, and the time that it took."""
    started_s = time.process_time()
    arrivals = Arrivals(
        path=TRACES / f"{experiment.trace}_trace.jsonl.xz", speed=experiment.speed, limit=experiment.limit
    )
    simulation = Simulation(
        experiment.options, machine(model_profile(MODEL), hardware_profile(HARDWARE)), arrivals.check()
    )
    simulation.run(arrivals)
    found = record(simulation, arrivals)
    if not experiment.name.startswith("overload"):
        del found["load"]
    return {**found, "cpu_s": round(time.process_time() - started_s, 2)}


def main() -> None:
    asked = sys.argv[1:] or list(GROUPS)
    unknown = [name for name in asked if name not in GROUPS]
    if unknown:
        sys.exit(f"there is no group {', '.join(unknown)}: expected some of {', '.join(GROUPS)}")
    found: dict[str, Any] = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    experiments = [experiment for name in asked for experiment in GROUPS[name]()]
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1)) as executor:
        for experiment, figures in zip(experiments, executor.map(run, experiments), strict=True):
            found[experiment.name] = figures
            FIGURES.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{experiment.name}: {figures['cpu_s']} s", file=sys.stderr, flush=True)
    if {"overload early", "overload predictive"} <= found.keys():
        _draw(found)
    PAGE.write_text(page(found))


def _draw(found: dict[str, Any]) -> None:
    early, predictive = (found[f"overload {name}"]["load"] for name in ("early", "predictive"))
    num = min(len(early["at_s"]), len(predictive["at_s"]))
    series(
        LOAD_PICTURE,
        "simulated: conversation at twice its speed, 8 prefill and 1 decode instance",
        early["at_s"][:num],
        (
            ("Prefill: seconds ahead, mean", _both(early, predictive, "prefill_backlog_s", num)),
            ("Decode: sequences in the batch", _both(early, predictive, "decode_batch", num)),
        ),
    )


def _both(early: dict[str, Any], predictive: dict[str, Any], name: str, num: int) -> dict[str, list[float]]:
    return {"early": early[name][:num], "predictive": predictive[name][:num]}


if __name__ == "__main__":
    main()
