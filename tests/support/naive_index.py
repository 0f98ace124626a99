"""What the chunk index must say, worked out the slow and obvious way."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from halfmoon.schemas.chunks import ChunkEvent, ChunkEvicted, ChunkRegistered, Tier
from halfmoon.schemas.ids import ChunkKey, NodeId


@dataclass
class NaiveIndex:
    """All events so far, read anew for each question."""

    events: list[ChunkEvent] = field(default_factory=list)

    def epoch(self, node: NodeId) -> int | None:
        return max((event.epoch for event in self.events if event.node == node), default=None)

    def holds(self, node: NodeId, key: ChunkKey) -> bool:
        held = False
        newest = -1
        for event in self.events:
            if event.node != node or event.epoch < newest:
                continue
            if event.epoch > newest:
                held, newest = False, event.epoch
            if isinstance(event, ChunkRegistered) and any(chunk.key == key for chunk in event.chunks):
                held = True
            if isinstance(event, ChunkEvicted) and key in event.keys:
                held = False
        return held


class PlainIndex:
    """A set of holders a chunk, and a set of chunks a node: too large for a cluster, and easy to believe."""

    def __init__(self) -> None:
        self.holders: dict[ChunkKey, set[NodeId]] = {}
        self.on_ssd: dict[ChunkKey, set[NodeId]] = {}
        self.epochs: dict[NodeId, int] = {}

    def apply(self, event: ChunkEvent) -> None:
        known = self.epochs.get(event.node, -1)
        if event.epoch < known:
            return
        if event.epoch > known:
            self.epochs[event.node] = event.epoch
            for key in list(self.holders):
                self._take(event.node, key)
        if isinstance(event, ChunkRegistered):
            for chunk in event.chunks:
                self.holders.setdefault(chunk.key, set()).add(event.node)
                below = self.on_ssd.setdefault(chunk.key, set())
                (below.add if chunk.tier is Tier.SSD else below.discard)(event.node)
        if isinstance(event, ChunkEvicted):
            for key in event.keys:
                self._take(event.node, key)

    def match(self, keys: Sequence[ChunkKey], live: Mapping[NodeId, int]) -> tuple[frozenset[NodeId], ...]:
        trusted = {node for node, epoch in live.items() if self.epochs.get(node) == epoch}
        found = []
        for key in keys:
            nodes = trusted & self.holders.get(key, set())
            if not nodes:
                break
            found.append(frozenset(nodes))
        return tuple(found)

    def matched_on_ssd(self, keys: Sequence[ChunkKey], live: Mapping[NodeId, int]) -> list[frozenset[NodeId]]:
        matched = self.match(keys, live)
        return [nodes & self.on_ssd.get(key, set()) for key, nodes in zip(keys, matched, strict=False)]

    def _take(self, node: NodeId, key: ChunkKey) -> None:
        self.on_ssd.get(key, set()).discard(node)
        nodes = self.holders.get(key, set())
        nodes.discard(node)
        if not nodes:
            self.holders.pop(key, None)
