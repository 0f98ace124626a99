"""How requests fared in the live system and in the simulator, and whether that agrees."""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TOLERANCES = {
    "TTFT, mean": 0.25,
    "TTFT, median": 0.25,
    "TTFT, 90th percentile": 0.25,
    "between tokens, mean": 0.1,
}
"""How far times in the live system may be from the simulator's, as shares of these; docs/simulator.md has them too."""
APART = {
    "prompt tokens reused": 0.02,
    "prompts at the busier prefill worker": 0.1,
}
"""How far shares may be apart."""


@dataclass(slots=True)
class Placed:
    """One request, live or simulated: where it went, and how it fared. Seconds."""

    number: int
    blocks: tuple[int, ...]
    at_s: float
    prompt_tokens: int
    prefill: str = ""
    reused_tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.at_s


def ttfts_s(placed: Sequence[Placed]) -> list[float]:
    return [each.ttft_s for each in placed if each.ttft_s is not None]


def percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def gap_s(placed: Sequence[Placed]) -> float:
    gaps = [
        (each.last_s - each.first_s) / (each.num_tokens - 1)
        for each in placed
        if each.first_s is not None and each.last_s is not None and each.num_tokens > 1
    ]
    return statistics.fmean(gaps)


def reused(placed: Sequence[Placed]) -> float:
    return sum(each.reused_tokens for each in placed) / sum(each.prompt_tokens for each in placed)


def busier(placed: Sequence[Placed]) -> float:
    counts = Counter(each.prefill for each in placed)
    return max(counts.values()) / sum(counts.values())


def with_the_previous(placed: Sequence[Placed]) -> float:
    """Share of the requests that went where the last one went that has half of their chunks or more."""
    last: dict[int, str] = {}
    num_same = num_known = 0
    for each in placed:
        whole = each.blocks[:-1]  # The last is mostly a part of one.
        known = [last[block] for block in whole if block in last]
        if whole and 2 * len(known) >= len(whole):
            num_known += 1
            num_same += known[-1] == each.prefill
        last |= dict.fromkeys(whole, each.prefill)
    return num_same / max(1, num_known)


MEASURES: dict[str, Callable[[Sequence[Placed]], float]] = {
    "TTFT, mean": lambda placed: statistics.fmean(ttfts_s(placed)),
    "TTFT, median": lambda placed: statistics.median(ttfts_s(placed)),
    "TTFT, 90th percentile": lambda placed: percentile(ttfts_s(placed), 90),
    "TTFT, 99th percentile": lambda placed: percentile(ttfts_s(placed), 99),
    "between tokens, mean": gap_s,
    "prompt tokens reused": reused,
    "prompts at the busier prefill worker": busier,
    "prompts where the last one went that has half their chunks": with_the_previous,
}
"""Times are in seconds, the rest are shares."""


def disagreements(live: Sequence[Placed], simulated: Sequence[Placed]) -> list[str]:
    """What is beyond its tolerance; and no request may have failed."""
    num_lost = sum(each.first_s is None for each in live)
    found = [f"{num_lost} requests failed"] if num_lost else []
    for name in (*TOLERANCES, *APART):
        ours, theirs = MEASURES[name](live), MEASURES[name](simulated)
        allowed = APART[name] if name in APART else TOLERANCES[name] * theirs
        if abs(ours - theirs) > allowed:
            found.append(f"{name}: {ours:.4g} live, {theirs:.4g} simulated, {allowed:.4g} apart at most")
    return found
