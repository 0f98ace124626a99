"""What every eviction policy keeps to, and lru and lfu against naive models."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.eviction import ChunkFacts, EvictionPolicy, PolicyName, Prompt, make_policy
from halfmoon.sim.hit_rate import replay, replay_belady
from halfmoon.sim.trace import TracePrompt

_CAPACITY = 12
_SECOND_NS = 1_000_000_000


def _block(path: tuple[int, ...]) -> int:
    """Equal for equal prefixes only."""
    number = 1
    for step in path:
        number = number * 4 + step
    return number


@st.composite
def traces(draw: st.DrawFn) -> list[TracePrompt]:
    """Prompts over a small alphabet, so that they share prefixes; gaps of none to an hour."""
    prompts = []
    now_ns = 0
    for path in draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=60)):
        now_ns += draw(st.sampled_from([0, 1, _SECOND_NS, 90 * _SECOND_NS, 3600 * _SECOND_NS]))
        blocks = tuple(_block(tuple(path[:end])) for end in range(1, len(path) + 1))
        prompts.append(TracePrompt(now_ns, blocks, draw(st.booleans())))
    return prompts


class Pool:
    """Drives a policy as a pool does: room is made before a chunk comes, what the prompt itself uses is leased."""

    def __init__(self, policy: EvictionPolicy[int]) -> None:
        self.policy = policy
        self.resident: set[int] = set()
        self.parents: dict[int, int | None] = {}
        self.victims: list[int] = []

    def serve(self, number: int, asked: TracePrompt) -> None:
        cached = [block for block in asked.blocks if block in self.resident]
        prompt = Prompt(number, asked.at_ns, len(asked.blocks), len(cached))
        leased = set(asked.blocks)
        parent = None
        for depth, block in enumerate(asked.blocks):
            if block in self.resident:
                self.policy.access(block, prompt)
            else:
                if len(self.resident) == _CAPACITY:
                    self.make_room(1, lambda candidate: candidate not in leased)
                self.policy.insert(block, ChunkFacts(parent, depth), prompt)
                self.resident.add(block)
                self.parents[block] = parent
            parent = block
            assert len(self.policy) == len(self.resident) <= _CAPACITY

    def make_room(self, num_chunks: int, evictable: Callable[[int], bool]) -> None:
        victims = self.policy.victims(num_chunks, evictable)
        assert len(victims) == min(num_chunks, sum(map(evictable, self.resident)))
        assert len(set(victims)) == len(victims)
        assert self.resident.issuperset(victims)
        assert all(map(evictable, victims))
        assert self.policy.victims(num_chunks, evictable) == victims
        for victim in victims:
            self.policy.remove(victim)
            self.resident.remove(victim)
        self.victims += victims


def _run(name: PolicyName, trace: list[TracePrompt]) -> Pool:
    pool = Pool(make_policy(name, _CAPACITY, int))
    for number, asked in enumerate(trace):
        pool.serve(number, asked)
    return pool


@pytest.mark.parametrize("name", PolicyName)
@given(trace=traces(), num_wanted=st.integers(0, 2 * _CAPACITY))
@settings(max_examples=60, deadline=None)
def test_a_pool_stays_within_bounds_and_gets_as_many_evictable_victims_as_there_are(
    name: PolicyName, trace: list[TracePrompt], num_wanted: int
) -> None:
    pool = _run(name, trace)
    pool.make_room(num_wanted, lambda block: block % 2 == 0)
    pool.make_room(num_wanted, lambda block: True)


@pytest.mark.parametrize("name", PolicyName)
@given(trace=traces())
@settings(max_examples=30, deadline=None)
def test_the_same_reports_give_the_same_victims(name: PolicyName, trace: list[TracePrompt]) -> None:
    assert _run(name, trace).victims == _run(name, trace).victims


@pytest.mark.parametrize("name", PolicyName)
@given(trace=traces(), capacity=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_no_policy_beats_the_optimum_or_hits_more_than_was_ever_there(
    name: PolicyName, trace: list[TracePrompt], capacity: int
) -> None:
    count = replay(trace, make_policy(name, capacity, int), capacity)
    bound = replay_belady(trace, capacity)
    unbounded = replay(trace, None, None)
    assert count.prefix_hits <= count.hits <= bound.hits <= unbounded.hits
    assert unbounded.hits == unbounded.references - unbounded.unique


@given(trace=traces())
@settings(max_examples=60, deadline=None)
def test_prefix_aware_never_takes_a_chunk_before_those_that_come_after_it(trace: list[TracePrompt]) -> None:
    pool = Pool(make_policy(PolicyName.PREFIX_AWARE, _CAPACITY, int))
    for number, asked in enumerate(trace):
        pool.serve(number, asked)
        orphans = [block for block in pool.resident if pool.parents[block] not in {None, *pool.resident}]
        assert orphans == []


def test_prefix_aware_spares_a_chunk_that_comes_back_before_those_after_it_have_gone() -> None:
    policy = make_policy(PolicyName.PREFIX_AWARE, 4, int)
    policy.insert(1, ChunkFacts(None, 0), Prompt(0, 0, 2, 0))
    policy.insert(2, ChunkFacts(1, 1), Prompt(0, 0, 2, 0))
    policy.remove(1)  # A reader has the chunk after it.
    policy.insert(1, ChunkFacts(None, 0), Prompt(1, 1, 1, 0))
    assert policy.victims(1, lambda _: True) == [2]
    policy.remove(2)
    assert policy.victims(1, lambda _: True) == [1]


@pytest.mark.parametrize("name", PolicyName)
def test_what_was_flushed_is_gone_and_can_come_again(name: PolicyName) -> None:
    policy = make_policy(name, 4, int)
    prompt = Prompt(0, 0, 2, 0)
    policy.insert(1, ChunkFacts(None, 0), prompt)
    policy.insert(2, ChunkFacts(1, 1), prompt)
    policy.remove(2, evicted=False)
    assert policy.victims(2, lambda _: True) == [1]
    policy.insert(2, ChunkFacts(1, 1), Prompt(1, 1, 2, 1))
    assert len(policy) == 2


@pytest.mark.parametrize("name", PolicyName)
def test_false_reports_are_refused(name: PolicyName) -> None:
    policy = make_policy(name, 4, int)
    prompt = Prompt(0, 0, 1, 0)
    with pytest.raises(KeyError):
        policy.access(1, prompt)
    with pytest.raises(KeyError):
        policy.remove(1)
    policy.insert(1, ChunkFacts(None, 0), prompt)
    with pytest.raises(ValueError, match="already"):
        policy.insert(1, ChunkFacts(None, 0), prompt)
    policy.remove(1)
    with pytest.raises(KeyError):
        policy.access(1, prompt)
    with pytest.raises(KeyError):
        policy.remove(1)


def test_a_pool_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make_policy(PolicyName.LRU, 0, int)


@given(trace=traces(), capacity=st.integers(1, 20))
@settings(max_examples=150, deadline=None)
def test_lru_hits_as_a_sorted_list_does(trace: list[TracePrompt], capacity: int) -> None:
    last_use: dict[int, tuple[int, int]] = {}
    hits = 0
    for number, asked in enumerate(trace):
        hits += sum(block in last_use for block in asked.blocks)
        for depth, block in enumerate(asked.blocks):
            if block not in last_use and len(last_use) == capacity:
                del last_use[min(last_use, key=last_use.__getitem__)]
            last_use[block] = number, -depth
    assert replay(trace, make_policy(PolicyName.LRU, capacity, int), capacity).hits == hits


@given(trace=traces(), capacity=st.integers(1, 20))
@settings(max_examples=150, deadline=None)
def test_lfu_hits_as_a_sorted_list_does(trace: list[TracePrompt], capacity: int) -> None:
    uses: dict[int, tuple[int, int]] = {}
    hits = tick = 0
    for asked in trace:
        hits += sum(block in uses for block in asked.blocks)
        for block in asked.blocks:
            tick += 1
            if block not in uses and len(uses) == capacity:
                del uses[min(uses, key=uses.__getitem__)]
            uses[block] = uses.get(block, (0, 0))[0] + 1, tick
    assert replay(trace, make_policy(PolicyName.LFU, capacity, int), capacity).hits == hits
