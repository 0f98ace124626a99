"""A simulation takes as much memory as what is in it at one time, however many requests pass through."""

import sys

import pytest

from halfmoon.eviction import PolicyName
from halfmoon.sim.distribution import Distribution
from halfmoon.sim.options import SimOptions
from halfmoon.sim.request import SimRequest
from halfmoon.sim.simulation import Simulation
from support.simulated import CHUNK, llama, traffic

pytestmark = pytest.mark.timeout(300)
"""Seconds of computing each; beside other work on the same cores they take many times as long."""

NUM_NODES = 4
POOL_CHUNKS = 300
WARM = 300
"""Requests until pools are full."""


def peak_blocks(num_requests: int, eviction: PolicyName) -> int:
    """Blocks of memory that a run has at most, beyond those before it, once pools are full."""
    peak = num_ended = 0

    def watch(request: SimRequest) -> None:
        nonlocal peak, num_ended
        num_ended += 1
        if num_ended > WARM and num_ended % 10 == 0:
            peak = max(peak, sys.getallocatedblocks() - before)

    options = SimOptions(
        prefill=NUM_NODES, decode=NUM_NODES, cache_tokens=POOL_CHUNKS * CHUNK, eviction=eviction, max_waiting=10
    )
    before = sys.getallocatedblocks()
    simulation = Simulation(options, llama(), CHUNK, watch)
    for name in ("ttft_s", "prefill_s", "tbt_s", "mean_tbt_s", "e2e_s"):
        setattr(simulation.tally, name, Distribution(max_exact=100))  # as a run of a million soon is
    simulation.run(traffic(limit=num_requests, repeat=3))
    assert num_ended == num_requests
    assert len(simulation.index) <= NUM_NODES * POOL_CHUNKS
    assert len(simulation.clock) == 0
    return peak


@pytest.mark.parametrize("eviction", [PolicyName.LRU, PolicyName.PREFIX_AWARE])
def test_three_times_the_requests_take_no_more_memory(eviction: PolicyName) -> None:
    peak_blocks(WARM + 20, eviction)  # what Python keeps for itself, once
    once, thrice = peak_blocks(800, eviction), peak_blocks(2400, eviction)
    assert thrice <= 1.15 * once
