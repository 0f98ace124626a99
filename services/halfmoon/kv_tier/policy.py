"""What a pool decides: where to take a wanted chunk from. Plans only; the service carries them out."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from halfmoon.schemas.ids import ChunkKey, NodeId
from halfmoon.schemas.kv_tier import ChunkSource, WantedChunk


@dataclass(frozen=True, slots=True)
class AcquirePlan:
    """Positions in what was wanted, by what is to be done for them."""

    local: tuple[int, ...]
    pulls: tuple[int, ...]
    missing: tuple[int, ...]


def plan_acquire(wanted: Sequence[WantedChunk], local: Container[ChunkKey], node: NodeId) -> AcquirePlan:
    """Local copies first; else a pull where some other node is named; else a miss."""
    here = [position for position, chunk in enumerate(wanted) if chunk.key in local]
    elsewhere = [
        position
        for position, chunk in enumerate(wanted)
        if chunk.key not in local and any(source.node != node for source in chunk.sources)
    ]
    known = {*here, *elsewhere}
    missing = [position for position in range(len(wanted)) if position not in known]
    return AcquirePlan(tuple(here), tuple(elsewhere), tuple(missing))


def next_source(sources: Sequence[ChunkSource], tried: Container[ChunkSource], node: NodeId) -> ChunkSource | None:
    """The best source that hasn't been tried, other than this node itself."""
    return next((source for source in sources if source.node != node and source not in tried), None)
