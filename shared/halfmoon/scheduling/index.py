"""Which node holds which chunk, as far as the stream `CHUNKS` has told. Pure.

A node's placements belong to one epoch of its pool. Whatever an event of a newer epoch says, all that the node held
before is gone; an event of an older one is too late to matter.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, assert_never

import msgspec

from halfmoon.scheduling.holders import NOBODY, HolderSets
from halfmoon.scheduling.runs import ChunkRuns
from halfmoon.schemas.chunks import (
    ChunkEvent,
    ChunkEvicted,
    ChunkMeta,
    ChunkPlacement,
    ChunkRegistered,
    NodeCleared,
    Tier,
)
from halfmoon.schemas.ids import ChunkKey, NodeId

_SWEEP_SHARE: Final = 8
"""A sweep begins when more than one chunk in so many has no holder."""
_SWEEP_STEP: Final = 2000


class Match(msgspec.Struct, frozen=True):
    """A prompt's cached prefix: its chunks up to the first that no live node holds."""

    holders: tuple[frozenset[NodeId], ...] = ()
    """For chunk 0, 1, …: the live nodes that hold it; never empty."""
    on_ssd: tuple[frozenset[NodeId], ...] = ()
    """For the same chunks: those of the holders that have it on the SSD only. Empty where no node has an SSD tier."""

    def __len__(self) -> int:
        return len(self.holders)

    def num_leading(self, node: NodeId) -> int:
        """Chunks that `node` holds from the first on, without a gap."""
        for count, nodes in enumerate(self.holders):
            if node not in nodes:
                return count
        return len(self.holders)

    def num_held(self, node: NodeId) -> int:
        """Chunks of the prefix that `node` holds, wherever they are in it."""
        return sum(node in nodes for nodes in self.holders)

    def num_on_ssd(self, node: NodeId) -> int:
        """Of these, how many it would have to read from its SSD."""
        return sum(node in nodes for nodes in self.on_ssd)


class ChunkIndex:
    """Chunk key → the set of its holders, at about 130 bytes a chunk (see docs/decisions.md).

    Keys are compared whole, and hashed by `dict` with a seed that nobody outside knows. There is no list of what a
    node holds; when it goes, its name leaves the sets, and chunks that nobody holds any more are swept out while
    later events are taken in.
    """

    def __init__(self) -> None:
        self._numbers = ChunkRuns()
        self._sets = HolderSets()
        self._epochs: dict[NodeId, int] = {}
        self._live: Mapping[NodeId, int] | None = None
        """What the sets' visible nodes were worked out from; None where they have to be anew."""
        self._to_sweep: list[bytes] = []
        """Keys, as the runs had them when the sweep began."""

    @classmethod
    def of(cls, placements: Iterable[ChunkPlacement], epochs: Mapping[NodeId, int]) -> "ChunkIndex":
        """From the registry's snapshot: `epochs` has the newest of every node, also of those that hold nothing."""
        index = cls()
        for node, epoch in epochs.items():
            index._enter(node, epoch)
        index.admit(placements)
        return index

    def __len__(self) -> int:
        """Number of distinct chunks."""
        return len(self._numbers) - self._sets.num_orphans

    @property
    def num_sets(self) -> int:
        """Different sets of holders in use, the empty one among them."""
        return len(self._sets)

    @property
    def num_orphans(self) -> int:
        """Chunks still to be swept out, whose nodes are gone."""
        return self._sets.num_orphans

    @property
    def epochs(self) -> Mapping[NodeId, int]:
        return self._epochs

    def admit(self, placements: Iterable[ChunkPlacement]) -> None:
        """Take in (more) placements of a snapshot. Those of an older epoch change nothing."""
        for placement in placements:
            if self._enter(placement.node, placement.epoch):
                # In the order of keys: few come after their parents, and runs of two would cost more than they save.
                self._put(placement.node, placement.chunk, None)

    def apply(self, event: ChunkEvent) -> None:
        """Take in one event of the stream, in order. Repeats, and late events of an older epoch, change nothing."""
        if not self._enter(event.node, event.epoch):
            return
        match event:
            case ChunkRegistered():
                for chunk in event.chunks:
                    self._put(event.node, chunk, chunk.parent)
            case ChunkEvicted():
                for key in event.keys:
                    self._take(event.node, key)
            case NodeCleared():
                pass
            case _ as unreachable:
                assert_never(unreachable)
        self._sweep()

    def nodes_of(self, key: ChunkKey) -> AbstractSet[NodeId]:
        return self._sets.nodes(self._numbers.get(key, NOBODY))

    def match(self, keys: Sequence[ChunkKey], live: Mapping[NodeId, int]) -> Match:
        """The longest prefix of `keys` that the live nodes hold together. `live` maps each to its present epoch; the
        same object again is taken to say the same, without a look at each node."""
        if live is not self._live:
            if live != self._live:
                self._sets.trust(frozenset(node for node, epoch in live.items() if self._epochs.get(node) == epoch))
            self._live = live
        numbers = self._numbers.along(keys)
        holders = self._sets.visible(numbers)
        return Match(holders, self._sets.on_ssd(numbers[: len(holders)]))

    def _enter(self, node: NodeId, epoch: int) -> bool:
        """Whether an event of this epoch counts. A newer one empties the node first."""
        known = self._epochs.get(node)
        if known == epoch:
            return True
        if known is not None and epoch < known:
            return False
        self._sets.remove(node)
        self._epochs[node] = epoch
        self._live = None
        return True

    def _put(self, node: NodeId, chunk: ChunkMeta, parent: ChunkKey | None) -> None:
        on_ssd = chunk.tier is Tier.SSD
        before = self._numbers.get(chunk.key, NOBODY)
        number = self._sets.including(before, node, on_ssd=on_ssd)
        if before == NOBODY:
            self._numbers.add(chunk.key, number, parent)
        elif number != before:
            self._numbers.put(chunk.key, number)

    def _take(self, node: NodeId, key: ChunkKey) -> None:
        number = self._numbers.get(key, NOBODY)
        if number == NOBODY:
            return
        left = self._sets.excluding(number, node)
        if left == NOBODY:
            self._numbers.remove(key)
        else:
            self._numbers.put(key, left)

    def _sweep(self) -> None:
        """A step of removing chunks that nobody holds, where they are many: a pass over all takes as long as several
        requests would wait."""
        if not self._to_sweep:
            if self._sets.num_orphans * _SWEEP_SHARE <= len(self._numbers):
                return
            self._to_sweep = self._numbers.stretches()
        num_looked_at = 0
        while self._to_sweep and num_looked_at < _SWEEP_STEP:
            for key in self._numbers.cut(self._to_sweep.pop()):
                num_looked_at += 1
                number = self._numbers.get(key, NOBODY)
                if number != NOBODY and self._sets.is_empty(number):
                    self._numbers.remove(key)
                    self._sets.forget(number)
