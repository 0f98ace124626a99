"""The simulated cluster, by hand and by properties: times add up, nothing is lost, the same seed is the same run."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.engine.sim.timing import Timing
from halfmoon.scheduling.policies import PolicyName
from halfmoon.schemas.ids import NodeId
from halfmoon.sim.batch import Batch
from halfmoon.sim.distribution import Distribution
from halfmoon.sim.network import Network
from halfmoon.sim.profiles.models import model_profile
from halfmoon.sim.report import record
from halfmoon.sim.request import Outcome, SimRequest
from support.simulated import CHUNK, PLAIN, asked, llama, simulated, traffic

pytestmark = pytest.mark.timeout(300)
"""Seconds of computing each; beside other work on the same cores they take many times as long."""

LATENCY_S = 0.001


def test_one_request_by_hand() -> None:
    """Computed, handed over but for the last chunk meanwhile, and decoded step by step."""
    ended: list[SimRequest] = []
    simulated([asked(0, 5.0, 1024, 3, 1, 2)], PLAIN, ended, prefill=1, decode=1)
    (request,) = ended
    prefill_s = 1024 * 0.001
    assert request.prefill_end_s == pytest.approx(5.0 + prefill_s)
    assert request.kv_at_s == pytest.approx(5.0 + prefill_s + CHUNK * 1000 / 1e9 + LATENCY_S)
    steps = [0.01 + 0.001 + (1024 + number) * 0.00001 for number in range(3)]
    assert request.ttft_s == pytest.approx(prefill_s + CHUNK * 1000 / 1e9 + LATENCY_S + steps[0])
    assert request.e2e_s == pytest.approx((request.ttft_s or 0) + steps[1] + steps[2])
    assert request.outcome is Outcome.FINISHED


def test_a_cached_prefix_is_not_computed_and_one_elsewhere_is_pulled() -> None:
    ended: list[SimRequest] = []
    first, again = asked(0, 0.0, 2048, 1, 1, 2, 3, 4), asked(1, 10.0, 2048, 1, 1, 2, 3, 9)
    simulation = simulated([first, again], PLAIN, ended, prefill=1, decode=1)
    assert (first.num_reused, again.num_reused) == (0, 3)
    assert again.prefill_s == pytest.approx(512 * 0.001)
    assert simulation.tally.bytes_pulled == 0
    # Two at once: the second goes to the other worker, and pulls what the first had computed long before.
    third, fourth = asked(2, 20.0, 4096, 1, 1, 2, 3, 4, 5, 6, 7, 8), asked(3, 20.0, 2048, 1, 1, 2, 3, 4)
    earlier = asked(0, 0.0, 2048, 1, 1, 2, 3, 4)
    simulation = simulated([earlier, third, fourth], PLAIN, ended, prefill=2, decode=1)
    assert fourth.num_reused == 4
    assert simulation.tally.bytes_pulled == 4 * CHUNK * 1000


@pytest.mark.parametrize("options", [{"prefill": 2, "decode": 2}, {"colocated": 3}, {"prefill": 1, "decode": 1}])
def test_nothing_is_lost_and_all_is_let_go(options: dict[str, int]) -> None:
    ended: list[SimRequest] = []
    simulation = simulated(traffic(limit=300), llama(), ended, max_waiting=1000, **options)
    tally, cluster = simulation.tally, simulation.cluster
    assert sorted(request.number for request in ended) == list(range(300))
    assert all(request.outcome is Outcome.FINISHED for request in ended)
    # Each token but a request's first came after a gap.
    assert tally.tbt_s.weight == tally.completion_tokens - tally.num_finished
    assert all(not cache.num_pinned for cache in cluster.caches.values())
    for decode in cluster.decodes.values():
        assert (decode.load.free_tokens, decode.load.num_requests, decode.load.context_tokens) == (
            llama().kv_tokens,
            0,
            0,
        )
    assert all(math.isclose(each.backlog_s, 0.0, abs_tol=1e-6) for each in cluster.prefills.values())
    for request in ended:
        assert request.first_token_s is not None
        assert request.last_token_s is not None
        assert request.at_s < request.first_token_s <= request.last_token_s


def test_the_same_seed_is_the_same_run_and_another_seed_draws_other_lots() -> None:
    arrivals = traffic(limit=200)

    def run(seed: int) -> str:
        simulation = simulated(arrivals, llama(), prefill=4, decode=2, policy=PolicyName.RANDOM, seed=seed)
        return json.dumps(record(simulation, arrivals))

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_a_chunk_that_is_gone_costs_a_recompute_and_nothing_else() -> None:
    """The index hears of evictions five seconds late, and small pools evict all the time."""
    ended: list[SimRequest] = []
    simulation = simulated(
        traffic(limit=600), llama(), ended, prefill=4, decode=2, cache_tokens=200_000, index_lag_s=5.0
    )
    assert simulation.tally.num_stale > 0
    assert {request.outcome for request in ended} == {Outcome.FINISHED}
    assert len(ended) == 600


def test_pools_hold_no_more_than_they_have_room_for_and_the_index_knows_what() -> None:
    simulation = simulated(traffic(limit=400), llama(), prefill=3, decode=1, cache_tokens=100_000, index_lag_s=0.0)
    caches = simulation.cluster.caches
    assert all(0 < len(cache) <= 100_000 // CHUNK for cache in caches.values())
    simulation.hear_all()
    for node, cache in caches.items():
        assert all(node in simulation.index.nodes_of(key) for key in cache)
    assert len(simulation.index) == len({key for cache in caches.values() for key in cache})


def test_known_models_have_the_weights_that_they_are_known_for() -> None:
    """Norms, a ten-thousandth of all, aren't counted."""
    for name, weights in (("llama2-70b", 68_976_648_192), ("llama3-8b", 8_030_261_248), ("smollm2-135m", 134_515_008)):
        assert model_profile(name).weight_bytes / 2 == pytest.approx(weights, rel=3e-4)
    assert model_profile("llama2-70b").kv_bytes_per_token == 2 * 80 * 8 * 128 * 2


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 60)), min_size=1, max_size=8),
    st.floats(0.0, 0.001),
    st.integers(1, 60),
)
def test_many_steps_at_once_take_as_long_as_one_by_one(
    sequences: list[tuple[int, int]], context_s: float, num_steps: int
) -> None:
    timing = Timing(token_s=0.001, step_overhead_s=0.01, step_token_s=0.002, step_context_s=context_s)
    batch = Batch(timing)
    for number, (num_tokens, num_left) in enumerate(sequences):
        batch.join(asked(number, 0.0, num_tokens, num_left), num_tokens, num_left)
    context = sum(num_tokens for num_tokens, _ in sequences)
    one_by_one = 0.0
    for step in range(num_steps):
        one_by_one += timing.step_s(len(sequences), context + step * len(sequences))
    assert batch.duration_s(num_steps) == pytest.approx(one_by_one)
    assert batch.steps_until(batch.duration_s(num_steps) * (1 - 1e-6)) == num_steps
    steps = batch.steps_to_end
    done = batch.pass_steps(steps)
    assert {request.num_completion for request in done} == {steps}
    assert batch.context_tokens == sum(n + steps for n, left in sequences if left > steps)


@settings(max_examples=50)
@given(st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=200))
def test_percentiles_are_exact_while_few_and_near_when_many(values: list[float]) -> None:
    exact, folded = Distribution(), Distribution(max_exact=1)
    for value in values:
        exact.add(value)
        folded.add(value)
    for share in (0.5, 0.9, 0.99):
        true = float(np.quantile(np.asarray(values), share, method="inverted_cdf"))
        assert exact.quantile(share) == pytest.approx(true)
        assert folded.quantile(share) == pytest.approx(true, rel=0.0051)


def test_a_nic_never_carries_more_than_it_can() -> None:
    a, b, c = NodeId("a"), NodeId("b"), NodeId("c")
    network = Network(100.0, latency_s=0.0)
    assert network.send(a, b, 200, 0.0) == 2.0
    assert network.send(c, b, 100, 0.0) == 3.0

    assert network.send(c, a, 100, 0.0) == 2.0
    assert network.estimate_s(a, b, 100, 1.0) == 3.0
    assert network.send(a, a, 1000, 1.0) == 1.0
