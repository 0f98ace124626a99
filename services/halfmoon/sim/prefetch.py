"""Replays a trace over several pools with the conductors' prefetching: what it brings, and what of that is used."""

from collections.abc import Sequence
from dataclasses import dataclass

from halfmoon.eviction import ChunkFacts, EvictionPolicy, PolicyName, Prompt, make_policy
from halfmoon.scheduling.continuations import Continuations
from halfmoon.schemas.ids import ChunkKey
from halfmoon.sim.trace import TracePrompt

MAX_PREFETCHED = 16
"""Blocks on account of one prompt, as in a conductor."""
_HEADROOM = 1.2
"""Nodes together compute this many times what the trace asks for."""


@dataclass(slots=True)
class PrefetchCount:
    """What a replay came to, in blocks."""

    references: int = 0
    local: int = 0
    """Held by the node where the prompt was placed."""
    remote: int = 0
    """Held by another, and pulled."""
    prefetched: int = 0
    used: int = 0
    """Of those prefetched, what a prompt found before it was evicted."""
    wasted: int = 0
    """What was evicted before."""


class _Node:
    def __init__(self, policy: PolicyName, capacity: int) -> None:
        self.policy: EvictionPolicy[int] = make_policy(policy, capacity, int)
        self.capacity = capacity
        self.blocks: set[int] = set()
        self.unused: set[int] = set()
        """Prefetched blocks that no prompt has found yet."""
        self.queued = 0.0

    def num_leading(self, blocks: Sequence[int]) -> int:
        return next((at for at, block in enumerate(blocks) if block not in self.blocks), len(blocks))

    def store(self, block: int, facts: ChunkFacts[int], prompt: Prompt, count: PrefetchCount) -> None:
        self.policy.insert(block, facts, prompt)
        self.blocks.add(block)
        if len(self.blocks) > self.capacity:
            for victim in self.policy.victims(1, lambda each: each != block):
                self.policy.remove(victim)
                self.blocks.remove(victim)
                count.wasted += victim in self.unused
                self.unused.discard(victim)


def replay_prefetch(
    trace: Sequence[TracePrompt],
    *,
    num_nodes: int,
    capacity: int,
    confidence: float,
    policy: PolicyName = PolicyName.LRU,
) -> PrefetchCount:
    """Each prompt goes to the node where fewest blocks are queued or to be computed, and leaves its blocks there.

    `capacity`: blocks of each node. What is likely to follow a prefix of the prompt, and isn't in the prompt, is then
    copied from a node that has it.
    """
    count = PrefetchCount()
    nodes = [_Node(policy, capacity) for _ in range(num_nodes)]
    seen = Continuations()
    span_ns = max(1, trace[-1].at_ns - trace[0].at_ns)
    per_ns = _HEADROOM * sum(len(asked.blocks) for asked in trace) / span_ns / num_nodes
    before_ns = trace[0].at_ns
    for number, asked in enumerate(trace):
        for node in nodes:
            node.queued = max(0.0, node.queued - per_ns * (asked.at_ns - before_ns))
        before_ns = asked.at_ns
        node = min(nodes, key=lambda node: node.queued + len(asked.blocks) - node.num_leading(asked.blocks))
        num_cached = node.num_leading(asked.blocks)
        node.queued += len(asked.blocks) - num_cached
        prompt = Prompt(number, asked.at_ns, len(asked.blocks), num_cached)
        _serve(asked, prompt, node, nodes, count)
        if confidence < 1.0:
            whole = asked.blocks if asked.last_is_full else asked.blocks[:-1]
            _prefetch(whole, prompt, node, nodes, seen, confidence, count)
    return count


def _serve(asked: TracePrompt, prompt: Prompt, node: _Node, nodes: Sequence[_Node], count: PrefetchCount) -> None:
    parent: int | None = None
    count.references += len(asked.blocks)
    for depth, block in enumerate(asked.blocks):
        if block in node.blocks:
            node.policy.access(block, prompt)
            count.local += 1
            count.used += block in node.unused
            node.unused.discard(block)
        else:
            count.remote += any(block in other.blocks for other in nodes)
            full = depth < len(asked.blocks) - 1 or asked.last_is_full
            node.store(block, ChunkFacts(parent, depth, full), prompt, count)
        parent = block


def _prefetch(
    blocks: Sequence[int],
    prompt: Prompt,
    node: _Node,
    nodes: Sequence[_Node],
    seen: Continuations,
    confidence: float,
    count: PrefetchCount,
) -> None:
    keys = [_key(block) for block in blocks]
    seen.see(keys)
    for at, key in enumerate(keys):
        likely = seen.likely(key, confidence, MAX_PREFETCHED)
        if not likely or likely[0] == (keys[at + 1] if at + 1 < len(keys) else None):
            continue
        parent = blocks[at]
        for depth, following in enumerate(likely, at + 1):
            block = int.from_bytes(following)
            if parent not in node.blocks or not any(block in other.blocks for other in nodes):
                break
            if block not in node.blocks:
                count.prefetched += 1
                node.unused.add(block)
                node.store(block, ChunkFacts(parent, depth), prompt, count)
            parent = block


def _key(block: int) -> ChunkKey:
    return ChunkKey(block.to_bytes(8))
