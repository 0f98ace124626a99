"""Which node holds which chunk, as far as the stream `CHUNKS` has told. Pure.

A node's placements belong to one epoch of its pool. Whatever an event of a newer epoch says, all that the node held
before is gone; an event of an older one is too late to matter.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import assert_never

from halfmoon.schemas.chunks import ChunkEvent, ChunkEvicted, ChunkPlacement, ChunkRegistered, NodeCleared
from halfmoon.schemas.ids import ChunkKey, NodeId


@dataclass(frozen=True, slots=True)
class Match:
    """A prompt's cached prefix: its chunks up to the first that no live node holds."""

    holders: tuple[frozenset[NodeId], ...] = ()
    """For chunk 0, 1, …: the live nodes that hold it; never empty."""

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


class ChunkIndex:
    """Chunk key → nodes, and node → chunk keys, so that a node can go at once."""

    def __init__(self) -> None:
        self._holders: dict[ChunkKey, set[NodeId]] = {}
        self._held: dict[NodeId, set[ChunkKey]] = {}
        self._epochs: dict[NodeId, int] = {}

    @classmethod
    def of(cls, placements: Iterable[ChunkPlacement], epochs: Mapping[NodeId, int]) -> "ChunkIndex":
        """From the registry's snapshot: `epochs` has the newest of every node, also of those that hold nothing."""
        index = cls()
        for node, epoch in epochs.items():
            index._enter(node, epoch)
        for placement in placements:
            if index._enter(placement.node, placement.epoch):
                index._put(placement.node, placement.chunk.key)
        return index

    def __len__(self) -> int:
        """Number of distinct chunks."""
        return len(self._holders)

    @property
    def epochs(self) -> Mapping[NodeId, int]:
        return self._epochs

    def apply(self, event: ChunkEvent) -> None:
        """Take in one event of the stream, in order. Repeats, and late events of an older epoch, change nothing."""
        if not self._enter(event.node, event.epoch):
            return
        match event:
            case ChunkRegistered():
                for chunk in event.chunks:
                    self._put(event.node, chunk.key)
            case ChunkEvicted():
                for key in event.keys:
                    self._take(event.node, key)
            case NodeCleared():
                pass
            case _ as unreachable:
                assert_never(unreachable)

    def nodes_of(self, key: ChunkKey) -> AbstractSet[NodeId]:
        return frozenset(self._holders.get(key, ()))

    def match(self, keys: Sequence[ChunkKey], live: Mapping[NodeId, int]) -> Match:
        """The longest prefix of `keys` that the live nodes hold together. `live` maps each to its present epoch."""
        trusted = {node for node, epoch in live.items() if self._epochs.get(node) == epoch}
        found: list[frozenset[NodeId]] = []
        for key in keys:
            nodes = trusted.intersection(self._holders.get(key, ()))
            if not nodes:
                break
            found.append(frozenset(nodes))
        return Match(tuple(found))

    def _enter(self, node: NodeId, epoch: int) -> bool:
        """Whether an event of this epoch counts. A newer one empties the node first."""
        known = self._epochs.get(node)
        if known is not None and epoch < known:
            return False
        if known != epoch:
            self._clear(node)
            self._epochs[node] = epoch
        return True

    def _put(self, node: NodeId, key: ChunkKey) -> None:
        self._holders.setdefault(key, set()).add(node)
        self._held.setdefault(node, set()).add(key)

    def _take(self, node: NodeId, key: ChunkKey) -> None:
        self._held.get(node, set()).discard(key)
        nodes = self._holders.get(key)
        if nodes is not None:
            nodes.discard(node)
            if not nodes:
                del self._holders[key]

    def _clear(self, node: NodeId) -> None:
        for key in self._held.pop(node, set()).copy():
            self._take(node, key)
