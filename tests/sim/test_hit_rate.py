"""The policies over Mooncake's traces: figures known from elsewhere, exactly, and how the default compares."""

from functools import cache
from pathlib import Path

import pytest

from halfmoon.eviction import PolicyName, make_policy
from halfmoon.sim.hit_rate import replay, replay_belady
from halfmoon.sim.trace import TracePrompt, read_prompts

pytestmark = pytest.mark.timeout(180)
"""Long replays; beside other work on the same cores they take several times as long."""

_TRACES = Path(__file__).parent.parent / "data" / "mooncake"
_BOUNDS = (1_000, 10_000, 30_000)


@cache
def _trace(name: str) -> list[TracePrompt]:
    return read_prompts(_TRACES / f"{name}_trace.jsonl.xz")


@cache
def _hit_ratio(name: str, policy: PolicyName, num_blocks: int) -> float:
    count = replay(_trace(name), make_policy(policy, num_blocks, int), num_blocks)
    return round(count.hit_ratio, 4)


@pytest.mark.parametrize(
    ("name", "references", "unique", "ideal"),
    [("conversation", 288_500, 182_790, 0.3664), ("synthetic", 121_877, 43_924, 0.6396)],
)
def test_a_pool_without_bounds(name: str, references: int, unique: int, ideal: float) -> None:
    count = replay(_trace(name), None, None)
    assert (count.references, count.unique, round(count.hit_ratio, 4)) == (references, unique, ideal)
    assert count.prefix_hits == count.hits


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("conversation", (0.3637, 0.3546, 0.3257, 0.2116, 0.0445)),
        ("synthetic", (0.6396, 0.6396, 0.6242, 0.4239, 0.0841)),
    ],
)
def test_lru(name: str, expected: tuple[float, ...]) -> None:
    bounds = (100_000, 50_000, 30_000, 10_000, 1_000)
    assert tuple(_hit_ratio(name, PolicyName.LRU, num_blocks) for num_blocks in bounds) == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("conversation", (0.0529, 0.2225, 0.3110)), ("synthetic", (0.0934, 0.4359, 0.6260))]
)
def test_arc(name: str, expected: tuple[float, ...]) -> None:
    assert tuple(_hit_ratio(name, PolicyName.ARC, num_blocks) for num_blocks in _BOUNDS) == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("conversation", (0.1907, 0.3664, 0.3664)), ("synthetic", (0.2767, 0.6180, 0.6396))]
)
def test_the_optimum(name: str, expected: tuple[float, ...]) -> None:
    found = tuple(round(replay_belady(_trace(name), num_blocks).hit_ratio, 4) for num_blocks in _BOUNDS)
    assert found == expected


@pytest.mark.parametrize("num_blocks", _BOUNDS)
@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_the_default_is_at_least_the_best_of_the_others(name: str, num_blocks: int) -> None:
    others = {policy: _hit_ratio(name, policy, num_blocks) for policy in PolicyName if policy != "prefix_aware"}
    assert _hit_ratio(name, PolicyName.PREFIX_AWARE, num_blocks) >= max(others.values()), others
