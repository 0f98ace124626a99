"""The default: keep what is likely to be used soon, judged by its place in the prompts seen; leaves go first."""

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic

from halfmoon.eviction.contract import ChunkFacts, K, Prompt
from halfmoon.eviction.hazard import Kind, ReuseModel, cell_of
from halfmoon.eviction.known import KnownChunk
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

_NO_LEAF = math.inf, None


class PrefixAware(Generic[K]):
    """Ranks the leaves of the tree of prompts by what `ReuseModel` says they are worth: uses per second of keeping.

    A chunk without its prefix is useless, so only leaves go: chunks that no chunk in the pool comes after. When the
    last child of a chunk is gone, it is a leaf itself, with the kind and age that its own last use gave it.

    The kind of a chunk, from its last use: how often it was used again by then, and how long the prompt was, by powers
    of two. A prompt's partly filled end is a kind of its own. More features (the turn of a conversation, the depth,
    how much of the prompt was new) gain in steady traffic and lose when it changes: docs/eviction.md has the figures.

    Chunks are remembered after they have gone, so that a use that came too late is learned from too, and a chunk that
    comes back is known. About 260 bytes per chunk or ghost, beside the key.
    """

    may_refuse = True

    def __init__(self, capacity: int) -> None:
        """`capacity` is how many chunks the pool holds: it sets how much is remembered and how often it is judged."""
        self._num_ghosts = min(_MAX_GHOSTS, _NUM_GHOSTS + _GHOSTS_PER_CHUNK * capacity)
        turnover = capacity + self._num_ghosts
        self._round_reports = max(_MIN_ROUND, turnover // _ROUNDS_PER_TURNOVER)
        self._model = ReuseModel(half_life_rounds=_HALF_LIFE_TURNOVERS * turnover / self._round_reports)
        self._leaves: Leaves[K] = Leaves(self._model)
        self._known: dict[K, KnownChunk[K]] = {}
        self._before: dict[K, KnownChunk[K]] = {}
        """The chunk before each one, while both are in the pool."""
        self._ghosts: OrderedDict[K, None] = OrderedDict()
        """Those known that aren't in the pool, the longest gone first."""
        self._num_reports = 0
        self._now_ns = 0
        self._prompt_number: int | None = None
        self._length_bits = 0
        """The present prompt's length, as kinds have it."""
        self._new_leaves: dict[K, KnownChunk[K]] = {}
        """Not offered yet: what comes or goes next is mostly the chunk after the newest, or the one before the last
        to go, and then to offer them would have been for nothing."""

    def insert(self, key: K, facts: ChunkFacts[K], prompt: Prompt) -> None:
        known = self._known.get(key)
        if known is not None and known.in_pool:
            raise ValueError(f"chunk {key!r} is in the pool already")
        self._num_reports += 1
        if prompt.number != self._prompt_number:
            self._pass_to(prompt)
        before = None if facts.parent is None else self._known.get(facts.parent)
        if before is not None and before.in_pool:
            self._before[key] = before
            before.num_children += 1
            if self._new_leaves.pop(before.key, None) is None:
                self._leaves.discard(before)
        if self._new_leaves:
            self._offer_new_leaves()
        if known is None:
            known = self._known[key] = KnownChunk(key, facts.depth, facts.full)
        else:
            del self._ghosts[key]
            self._count_use(known)
            known.in_pool = True
        self._restart(known)
        if known.num_children == 0:
            self._new_leaves[key] = known

    def access(self, key: K, prompt: Prompt) -> None:
        known = self._in_pool(key)
        if self._new_leaves:
            self._offer_new_leaves()
        self._num_reports += 1
        if prompt.number != self._prompt_number:
            self._pass_to(prompt)
        self._leaves.discard(known)
        self._count_use(known)
        self._restart(known)
        if known.num_children == 0:
            self._leaves.add(known, self._now_ns)

    def remove(self, key: K, *, evicted: bool = True) -> None:
        known = self._in_pool(key)
        if self._new_leaves.pop(key, None) is None:
            self._leaves.discard(known)
        known.in_pool = False
        before = self._before.pop(key, None)
        if before is not None:
            before.num_children -= 1
            if before.num_children == 0 and before.in_pool:
                self._new_leaves[before.key] = before
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
        self._offer_new_leaves()
        chosen: dict[K, None] = {}
        gone_children: dict[K, int] = {}
        bared: list[tuple[float, int, KnownChunk[K]]] = []
        leaves = self._leaves.cheapest()
        worth, leaf = next(leaves, _NO_LEAF)
        while len(chosen) < num_chunks:
            if bared and bared[0][0] <= worth:
                _, _, known = heapq.heappop(bared)
            elif leaf is not None:
                known = leaf
                worth, leaf = next(leaves, _NO_LEAF)
            else:
                break
            if not evictable(known.key):
                continue
            chosen[known.key] = None
            before = self._before.get(known.key)
            if before is None or not before.in_pool:
                continue
            num_gone = gone_children[before.key] = gone_children.get(before.key, 0) + 1
            if num_gone == before.num_children:
                heapq.heappush(bared, (self._worth(before), len(chosen), before))
        if len(chosen) < num_chunks:
            hidden = (
                known for key, known in self._known.items() if known.in_pool and key not in chosen and evictable(key)
            )
            for known in heapq.nsmallest(num_chunks - len(chosen), hidden, key=_age_from_the_end):
                chosen[known.key] = None
        return list(chosen)

    def __len__(self) -> int:
        return len(self._known) - len(self._ghosts)

    def _in_pool(self, key: K) -> KnownChunk[K]:
        known = self._known[key]
        if not known.in_pool:
            raise KeyError(key)
        return known

    def _pass_to(self, prompt: Prompt) -> None:
        """Time passes between prompts only, so that all of a prompt's chunks are judged alike."""
        self._offer_new_leaves()
        self._prompt_number, self._now_ns = prompt.number, max(self._now_ns, prompt.now_ns)
        self._length_bits = min(prompt.num_chunks.bit_length(), _MAX_LENGTH_BITS)
        if self._num_reports >= self._round_reports:
            self._num_reports = 0
            self._model.fit(self._now_ns)
            self._leaves.reprice()
        self._leaves.advance(self._now_ns)

    def _count_use(self, known: KnownChunk[K]) -> None:
        self._model.end(known.kind, known.round, self._now_ns - known.used_ns, used=True)
        if known.uses < _MAX_USES:
            known.uses += 1

    def _restart(self, known: KnownChunk[K]) -> None:
        """Its age is zero, and its kind what this use says."""
        known.used_ns, known.round = self._now_ns, self._model.round
        is_tail = not known.full and not known.uses
        known.kind = self._model.begin(_TAIL if is_tail else (known.uses, self._length_bits))

    def _offer_new_leaves(self) -> None:
        for leaf in self._new_leaves.values():
            self._leaves.add(leaf, self._now_ns)
        self._new_leaves.clear()

    def _forget(self, key: K) -> None:
        """A ghost is followed no further."""
        del self._ghosts[key]
        known = self._known.pop(key)
        self._model.end(known.kind, known.round, self._now_ns - known.used_ns, used=False)

    def _worth(self, known: KnownChunk[K]) -> float:
        return self._model.worth(cell_of(known.kind, self._now_ns - known.used_ns))


def _age_from_the_end(known: KnownChunk[K]) -> tuple[int, int]:
    return known.used_ns, -known.depth
