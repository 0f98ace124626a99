"""The default: keep what is likely to be used soon, judged by its place in the prompts seen; leaves go first."""

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from halfmoon.eviction.contract import ChunkFacts, K, Prompt
from halfmoon.eviction.hazard import Kind, ReuseModel, bucket_of
from halfmoon.eviction.leaves import Leaves

_NUM_GHOSTS = 32_768
_GHOSTS_PER_CHUNK = 2
_MAX_GHOSTS = 262_144
_ROUNDS_PER_TURNOVER = 128
_MIN_ROUND = 512
_HALF_LIFE_TURNOVERS = 8
_MAX_USES = 3
_MAX_LENGTH_BITS = 7
"""Prompts of 64 chunks and more are all one length."""

_TAIL: Kind = (-1,)
"""A prompt's last, partly filled chunk: of use to the very same prompt only."""


@dataclass(slots=True)
class _Memory(Generic[K]):
    """What is remembered of a chunk: as long as it is in the pool, and a while after."""

    key: K
    depth: int
    parent: "_Memory[K] | None"
    """The chunk before this one, while both are in the pool."""
    full: bool
    uses: int = 0
    """Since it was first seen, without the first."""
    kind: int = 0
    used_ns: int = 0
    round: int = 0
    """The model's round at its last use."""
    in_pool: bool = False
    num_children: int = 0
    """Chunks in the pool that come after this one."""


class PrefixAware(Generic[K]):
    """Ranks the leaves of the tree of prompts by what `ReuseModel` says they are worth: uses per second of keeping.

    A chunk without its prefix is useless, so only leaves go: chunks that no chunk in the pool comes after. When the
    last child of a chunk is gone, it is a leaf itself, with the kind and age that its own last use gave it.

    The kind of a chunk, from its last use: how often it was used again by then, and how long the prompt was, by powers
    of two. A prompt's partly filled end is a kind of its own. More features (the turn of a conversation, the depth,
    how much of the prompt was new) gain in steady traffic and lose when it changes: docs/eviction.md has the figures.

    Chunks are remembered after they have gone, so that a use that came too late is learned from too, and a chunk that
    comes back is known. About 220 bytes per chunk or ghost, beside the key.
    """

    may_refuse = True

    def __init__(self, capacity: int) -> None:
        """`capacity` is how many chunks the pool holds: it sets how much is remembered and how often it is judged."""
        self._num_ghosts = min(_MAX_GHOSTS, _NUM_GHOSTS + _GHOSTS_PER_CHUNK * capacity)
        turnover = capacity + self._num_ghosts
        self._round_reports = max(_MIN_ROUND, turnover // _ROUNDS_PER_TURNOVER)
        self._model = ReuseModel(half_life_rounds=_HALF_LIFE_TURNOVERS * turnover / self._round_reports)
        self._leaves: Leaves[K] = Leaves(self._model)
        self._known: dict[K, _Memory[K]] = {}
        self._ghosts: OrderedDict[K, None] = OrderedDict()
        """Those known that aren't in the pool, the longest gone first."""
        self._num_reports = 0
        self._now_ns = 0
        self._prompt_number: int | None = None
        self._tip: _Memory[K] | None = None
        """The chunk inserted last, not offered as a leaf yet: what comes next mostly follows it."""

    def insert(self, key: K, facts: ChunkFacts[K], prompt: Prompt) -> None:
        known = self._known.get(key)
        if known is not None and known.in_pool:
            raise ValueError(f"chunk {key!r} is in the pool already")
        self._pass_to(prompt)
        before = None if facts.parent is None else self._known.get(facts.parent)
        if before is None or before is not self._tip:
            self._offer_tip()
        if known is None:
            known = self._known[key] = _Memory(key, facts.depth, None, facts.full)
        else:
            del self._ghosts[key]
            self._count_use(known)
        known.in_pool = True
        if before is not None and before.in_pool:
            known.parent = before
            before.num_children += 1
            if before is not self._tip:
                self._leaves.discard(before.key)
        self._restart(known, prompt)
        self._tip = known

    def access(self, key: K, prompt: Prompt) -> None:
        known = self._in_pool(key)
        self._offer_tip()
        self._pass_to(prompt)
        self._leaves.discard(key)
        self._count_use(known)
        self._restart(known, prompt)
        self._offer(known)

    def remove(self, key: K, *, evicted: bool = True) -> None:
        known = self._in_pool(key)
        self._offer_tip()
        self._leaves.discard(key)
        known.in_pool = False
        before, known.parent = known.parent, None
        if before is not None:
            before.num_children -= 1
            if before.in_pool:
                self._offer(before)
        self._ghosts[key] = None
        if not evicted:
            self._forget(key)
        elif len(self._ghosts) > self._num_ghosts:
            self._forget(next(iter(self._ghosts)))

    def victims(self, num_chunks: int, evictable: Callable[[K], bool]) -> list[K]:
        """Leaves, and what becomes one by their going; a leaf's prefix competes as soon as the leaf is chosen.

        Where a chunk that can't go (a reader has it) hides all that could, those go from the deepest end on.
        """
        if num_chunks <= 0:
            return []
        self._offer_tip()
        chosen: dict[K, None] = {}
        gone_children: dict[K, int] = {}
        bared: list[tuple[float, int, K]] = []
        leaves = self._leaves.cheapest()
        leaf = next(leaves, None)
        while len(chosen) < num_chunks and (leaf is not None or bared):
            if bared and (leaf is None or bared[0][0] <= leaf[0]):
                _, _, key = heapq.heappop(bared)
            else:
                assert leaf is not None
                key = leaf[1]
                leaf = next(leaves, None)
            if not evictable(key):
                continue
            chosen[key] = None
            before = self._known[key].parent
            if before is None or not before.in_pool:
                continue
            gone_children[before.key] = gone_children.get(before.key, 0) + 1
            if gone_children[before.key] == before.num_children:
                heapq.heappush(bared, (self._worth(before), len(chosen), before.key))
        if len(chosen) < num_chunks:
            hidden = (
                known for key, known in self._known.items() if known.in_pool and key not in chosen and evictable(key)
            )
            for known in heapq.nsmallest(num_chunks - len(chosen), hidden, key=_age_from_the_end):
                chosen[known.key] = None
        return list(chosen)

    def __len__(self) -> int:
        return len(self._known) - len(self._ghosts)

    def _in_pool(self, key: K) -> _Memory[K]:
        known = self._known[key]
        if not known.in_pool:
            raise KeyError(key)
        return known

    def _pass_to(self, prompt: Prompt) -> None:
        """Time passes between prompts only, so that all of a prompt's chunks are judged alike."""
        self._num_reports += 1
        if prompt.number == self._prompt_number:
            return
        self._offer_tip()
        self._prompt_number, self._now_ns = prompt.number, max(self._now_ns, prompt.now_ns)
        if self._num_reports >= self._round_reports:
            self._num_reports = 0
            self._model.fit(self._now_ns)
            self._leaves.reprice()
        self._leaves.advance(self._now_ns)

    def _count_use(self, known: _Memory[K]) -> None:
        self._model.end(known.kind, known.round, self._now_ns - known.used_ns, used=True)
        known.uses += 1

    def _restart(self, known: _Memory[K], prompt: Prompt) -> None:
        """Its age is zero, and its kind what this use says."""
        known.used_ns, known.round = self._now_ns, self._model.round
        known.kind = self._model.kind_id(_kind(known, prompt))
        self._model.begin(known.kind)

    def _offer_tip(self) -> None:
        tip, self._tip = self._tip, None
        if tip is not None:
            self._offer(tip)

    def _offer(self, known: _Memory[K]) -> None:
        if known.num_children == 0:
            self._leaves.add(known.key, known.kind, known.used_ns, self._now_ns)

    def _forget(self, key: K) -> None:
        """A ghost is followed no further."""
        del self._ghosts[key]
        known = self._known.pop(key)
        self._model.end(known.kind, known.round, self._now_ns - known.used_ns, used=False)

    def _worth(self, known: _Memory[K]) -> float:
        return self._model.worth(known.kind, bucket_of(self._now_ns - known.used_ns))


def _kind(known: _Memory[K], prompt: Prompt) -> Kind:
    if not known.full and not known.uses:
        return _TAIL
    return min(known.uses, _MAX_USES), min(prompt.num_chunks.bit_length(), _MAX_LENGTH_BITS)


def _age_from_the_end(known: _Memory[K]) -> tuple[int, int]:
    return known.used_ns, -known.depth
