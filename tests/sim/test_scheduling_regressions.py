"""What schedulers of this kind get wrong, as simulations of recorded traffic: docs/results.md has the figures."""

from functools import cache

import pytest

from halfmoon.scheduling.policies import PolicyName
from halfmoon.scheduling.slo import AdmissionName
from halfmoon.sim.report import record
from halfmoon.sim.request import SimRequest
from halfmoon.sim.simulation import Simulation
from halfmoon.sim.tally import Slo
from support.simulated import asked, llama, simulated, traffic

pytestmark = pytest.mark.timeout(900)
"""Whole traces; beside other work on the same cores they take several times as long."""


def _hit_ratio(simulation: Simulation) -> float:
    return float(record(simulation, traffic())["hit_ratio"])


def _max_over_mean(simulation: Simulation) -> float:
    return float(record(simulation, traffic())["load_max_over_mean"])


def test_where_every_prompt_begins_alike_load_spreads_and_reuse_stays() -> None:
    """All of the conversation trace shares block 0. By longest match alone, one node would get everything."""
    simulation = simulated(traffic(), llama(), prefill=10, decode=10, cache_tokens=3_000_000)
    assert _max_over_mean(simulation) <= 1.25
    assert _hit_ratio(simulation) >= 0.32
    assert simulation.tally.num_finished == simulation.tally.num_requests == 12_031


def test_reuse_is_that_of_others_schedulers_at_the_same_cache_sizes() -> None:
    """0.301 with eight caches of 8.4M tokens; one cache without bounds would have 0.374."""
    simulation = simulated(traffic(), llama(), prefill=8, decode=8, cache_tokens=8_400_000)
    assert 0.301 <= _hit_ratio(simulation) <= 0.374


@cache
def _overloaded(speed: float) -> Simulation:
    """About what four prefill and one decode instance can do, or twice that."""
    return simulated(
        traffic(limit=2500, speed=speed),
        llama(),
        prefill=4,
        decode=1,
        admission=AdmissionName.PREDICTIVE,
        slo=Slo(10.0, 0.05),
    )


def test_overload_does_not_collapse_goodput() -> None:
    usual, double = (record(_overloaded(speed), traffic()) for speed in (1.0, 2.0))
    assert double["rejected"] > 100
    assert double["goodput_rps"] >= 0.9 * usual["goodput_rps"]


def test_who_is_admitted_under_overload_is_served_in_time() -> None:
    found = record(_overloaded(2.0), traffic())
    served = found["num_requests"] - found["rejected"]
    assert found["slo_attainment"] * found["num_requests"] >= 0.95 * served


def test_a_node_that_comes_empty_is_not_flooded() -> None:
    """It is idle when it comes, and others hold the prefixes: its share stays near everybody's."""
    ended: list[SimRequest] = []
    simulation = simulated(traffic(limit=3000), llama(), ended, prefill=7, decode=4, joins_s=(600.0,))
    counts = [each.num_prompts for each in simulation.cluster.prefills.values()]
    late = sum(request.at_s >= 600.0 for request in ended)
    assert len(counts) == 8
    assert 0.5 * late / 8 <= counts[-1] <= 1.5 * late / 8


@pytest.mark.parametrize("policy", list(PolicyName))
def test_a_burst_of_equal_prompts_is_shared_out(policy: PolicyName) -> None:
    """Forty at once, of which nobody has anything: none of ten workers gets more than a quarter."""
    burst = [asked(number, 0.0, 8192, 4, *range(16)) for number in range(40)]
    simulation = simulated(burst, llama(), prefill=10, decode=2, policy=policy)
    assert max(each.num_prompts for each in simulation.cluster.prefills.values()) <= 10
