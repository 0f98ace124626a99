"""A simulation takes as much memory as what is in it at one time, however many requests pass through."""

import random
import sys
from collections.abc import Iterator

import pytest

from halfmoon.eviction import PolicyName
from halfmoon.sim.distribution import Distribution
from halfmoon.sim.load import LoadSeries
from halfmoon.sim.options import SimOptions
from halfmoon.sim.request import SimRequest
from halfmoon.sim.simulation import Simulation
from support.simulated import CHUNK, PLAIN, asked

pytestmark = pytest.mark.timeout(300)
"""Seconds of computing each; beside other work on the same cores they take many times as long."""

NUM_NODES = 4
POOL_CHUNKS = 200
WARM = 1000
"""Requests until pools are full and everything has its size."""


def arrivals(num_requests: int) -> Iterator[SimRequest]:
    """Some prefixes that many share, and an end of its own for each."""
    draw = random.Random(0)
    for number in range(num_requests):
        prefix = draw.randrange(60)
        shared = [1000 * prefix + depth for depth in range(draw.randrange(1, 4))]
        yield asked(number, 0.5 * number, 6 * CHUNK, 2, *shared, *(10**6 + 4 * number + each for each in range(3)))


def peak_blocks(num_requests: int, eviction: PolicyName) -> int:
    """Blocks of memory that a run has at most, beyond those before it, among its last thousand requests."""
    peak = num_ended = 0

    def watch(request: SimRequest) -> None:
        nonlocal peak, num_ended
        num_ended += 1
        if num_ended > num_requests - 1000 and num_ended % 10 == 0:
            peak = max(peak, sys.getallocatedblocks() - before)

    options = SimOptions(
        prefill=NUM_NODES, decode=NUM_NODES, cache_tokens=POOL_CHUNKS * CHUNK, eviction=eviction, max_waiting=10
    )
    before = sys.getallocatedblocks()
    simulation = Simulation(options, PLAIN, CHUNK, watch)
    for name in ("ttft_s", "prefill_s", "tbt_s", "mean_tbt_s", "e2e_s"):
        # A run of a million soon has more values, and samples, than are kept one by one.
        setattr(simulation.tally, name, Distribution(max_exact=100))
    simulation.load = LoadSeries(max_samples=20)
    simulation.run(arrivals(num_requests))
    assert num_ended == num_requests
    assert len(simulation.index) <= NUM_NODES * POOL_CHUNKS
    return peak


@pytest.mark.parametrize("eviction", [PolicyName.LRU, pytest.param(PolicyName.PREFIX_AWARE, marks=pytest.mark.nightly)])
def test_three_times_the_requests_take_no_more_memory(eviction: PolicyName, monkeypatch: pytest.MonkeyPatch) -> None:
    # So that what it remembers of evicted chunks is at its bound from the first thousand on.
    monkeypatch.setattr("halfmoon.eviction.prefix_aware._NUM_GHOSTS", 300)
    peak_blocks(WARM, eviction)  # what Python keeps for itself, once
    once, thrice = peak_blocks(2 * WARM, eviction), peak_blocks(6 * WARM, eviction)
    assert thrice <= 1.1 * once
