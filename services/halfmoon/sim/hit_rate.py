"""Replays a trace of prompts against an eviction policy, or against Belady's optimum, and counts hits."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from halfmoon.eviction import ChunkFacts, EvictionPolicy, Prompt
from halfmoon.sim.trace import TracePrompt

_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class HitCount:
    """What a replay came to."""

    references: int
    """Blocks looked up: the prompts' blocks, all together."""
    unique: int
    hits: int
    prefix_hits: int
    """Of the hits, those whose whole prefix was there too. Only these spare a pool any work."""

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.references if self.references else 0.0

    @property
    def prefix_hit_ratio(self) -> float:
        return self.prefix_hits / self.references if self.references else 0.0


def replay(trace: Sequence[TracePrompt], policy: EvictionPolicy[int] | None, capacity: int | None) -> HitCount:
    """Hits of a pool of `capacity` blocks under this policy; without a capacity, of one that never evicts.

    A prompt is looked up as a whole when it comes; then its blocks are stored or touched from the first to the last.
    Each block beyond the capacity costs a victim at once. A policy that may refuse can name the block that just came;
    what follows a refused block is refused with it, as nobody could use it.
    """
    resident: set[int] = set()
    references = hits = prefix_hits = 0
    for number, asked in enumerate(trace):
        found = [block in resident for block in asked.blocks]
        num_cached = found.index(False) if False in found else len(found)
        references += len(found)
        hits += sum(found)
        prefix_hits += num_cached
        if policy is None or capacity is None:
            resident.update(asked.blocks)
        else:
            prompt = Prompt(number, asked.at_ns, len(found), num_cached)
            _serve(asked, prompt, policy, capacity, resident)
    unique = len({block for asked in trace for block in asked.blocks})
    return HitCount(references, unique, hits, prefix_hits)


def _serve(asked: TracePrompt, prompt: Prompt, policy: EvictionPolicy[int], capacity: int, resident: set[int]) -> None:
    parent: int | None = None
    refused = False
    for depth, block in enumerate(asked.blocks):
        if block in resident:
            policy.access(block, prompt)
        else:
            full = depth < len(asked.blocks) - 1 or asked.last_is_full
            policy.insert(block, ChunkFacts(parent, depth, full), prompt)
            resident.add(block)
            if refused:
                victims = [block]
            elif len(resident) > capacity:
                victims = policy.victims(1, _anything if policy.may_refuse else _all_but(block))
            else:
                victims = []
            for victim in victims:
                policy.remove(victim)
                resident.remove(victim)
            refused = refused or block in victims
        parent = block


def _anything(block: int) -> bool:
    return True


def _all_but(newcomer: int) -> Callable[[int], bool]:
    return lambda block: block != newcomer


def replay_belady(trace: Sequence[TracePrompt], capacity: int) -> HitCount:
    """Hits of the optimum, which knows the future: after each prompt keep what is used soonest (Belady, 1966).

    Of blocks used next by the same prompt the first ones stay. What is never used again is not kept, so it needs no
    more room than there is.
    """
    next_use: list[list[int]] = []
    seen_at: dict[int, int] = {}
    for number in range(len(trace) - 1, -1, -1):
        next_use.append([seen_at.get(block, _NEVER) for block in trace[number].blocks])
        seen_at.update((block, number) for block in trace[number].blocks)
    unique = len(seen_at)
    next_use.reverse()
    resident: dict[int, int] = {}
    latest: list[tuple[int, int, int]] = []
    references = hits = prefix_hits = 0
    for asked, uses in zip(trace, next_use, strict=True):
        found = [block in resident for block in asked.blocks]
        references += len(found)
        hits += sum(found)
        prefix_hits += found.index(False) if False in found else len(found)
        for depth, (block, use) in enumerate(zip(asked.blocks, uses, strict=True)):
            resident.pop(block, None)
            if use != _NEVER:
                resident[block] = use
                heapq.heappush(latest, (-use, -depth, block))
        while len(resident) > capacity:
            minus_use, _, block = heapq.heappop(latest)
            if resident.get(block) == -minus_use:
                del resident[block]
    return HitCount(references, unique, hits, prefix_hits)
