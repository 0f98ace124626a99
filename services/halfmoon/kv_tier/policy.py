"""What a pool decides: where to take a wanted chunk from. Plans only; the service carries them out."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from halfmoon.schemas.ids import ChunkKey, NodeId
from halfmoon.schemas.kv_tier import ChunkSource, WantedChunk


@dataclass(frozen=True, slots=True)
class AcquirePlan:
    """Positions in what was wanted, by what is to be done for them."""

    local: tuple[int, ...]
    reads: tuple[int, ...]
    """From this node's SSD."""
    pulls: tuple[int, ...]
    missing: tuple[int, ...]


def plan_acquire(
    wanted: Sequence[WantedChunk], local: Container[ChunkKey], node: NodeId, on_ssd: Container[ChunkKey] = ()
) -> AcquirePlan:
    """Local copies first; then those on the SSD; else a pull where some other node is named; else a miss."""
    here = [position for position, chunk in enumerate(wanted) if chunk.key in local]
    below = [position for position, chunk in enumerate(wanted) if chunk.key not in local and chunk.key in on_ssd]
    known = {*here, *below}
    elsewhere = with_sources(wanted, (position for position in range(len(wanted)) if position not in known), node)
    known.update(elsewhere)
    missing = [position for position in range(len(wanted)) if position not in known]
    return AcquirePlan(tuple(here), tuple(below), tuple(elsewhere), tuple(missing))


def with_sources(wanted: Sequence[WantedChunk], positions: Iterable[int], node: NodeId) -> list[int]:
    """Those for which some other node is named."""
    return [at for at in positions if any(source.node != node for source in wanted[at].sources)]


def next_source(sources: Sequence[ChunkSource], tried: Container[ChunkSource], node: NodeId) -> ChunkSource | None:
    """The best source that hasn't been tried, other than this node itself."""
    return next((source for source in sources if source.node != node and source not in tried), None)
