"""What the leader writes: pure functions from events and what is known to steps. `store.py` makes them etcd operations.

A placement counts only while its node's record says the same epoch and doesn't say lost. So one small write hides
everything that a node held, at once and however much it was, and the sweep that deletes it can take its time.
"""

from collections.abc import Iterable, Mapping
from typing import TypeAlias, assert_never

import msgspec

from halfmoon.schemas.chunks import ChunkEvent, ChunkEvicted, ChunkPlacement, ChunkRegistered, NodeCleared
from halfmoon.schemas.ids import ChunkKey, NodeId


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What etcd knows of one node."""

    node: NodeId
    epoch: int
    lost_ns: int | None = None
    """Unix time at which the node was taken for dead; None while it lives."""
    stale: bool = False
    """Placements of older epochs may still lie in etcd: a sweep is due."""


class PutPlacement(msgspec.Struct, frozen=True):
    placement: ChunkPlacement


class DropPlacement(msgspec.Struct, frozen=True):
    key: ChunkKey
    node: NodeId


class PutNode(msgspec.Struct, frozen=True):
    record: NodeRecord


class DropNode(msgspec.Struct, frozen=True):
    node: NodeId


Step: TypeAlias = PutPlacement | DropPlacement | PutNode | DropNode
NodeRecords: TypeAlias = Mapping[NodeId, NodeRecord]


def visible(placement: ChunkPlacement, nodes: NodeRecords) -> bool:
    """Whether readers may be told of this placement."""
    record = nodes.get(placement.node)
    return record is not None and record.lost_ns is None and record.epoch == placement.epoch


def plan_event(event: ChunkEvent, nodes: NodeRecords) -> tuple[Step, ...]:
    """What one event of the stream changes. Nothing, where it comes from an older life of its node."""
    record = nodes.get(event.node)
    if record is not None and event.epoch < record.epoch:
        return ()
    steps: list[Step] = []
    if record is None:
        steps.append(PutNode(NodeRecord(node=event.node, epoch=event.epoch)))
    elif event.epoch > record.epoch:
        steps.append(PutNode(NodeRecord(node=event.node, epoch=event.epoch, stale=True)))
    match event:
        case ChunkRegistered():
            steps += [
                PutPlacement(ChunkPlacement(node=event.node, epoch=event.epoch, chunk=chunk)) for chunk in event.chunks
            ]
        case ChunkEvicted():
            steps += [DropPlacement(key, event.node) for key in event.keys]
        case NodeCleared():
            pass
        case _ as unreachable:
            assert_never(unreachable)
    return tuple(steps)


def after(nodes: NodeRecords, steps: Iterable[Step]) -> dict[NodeId, NodeRecord]:
    """The node records as they are once the steps are written."""
    known = dict(nodes)
    for step in steps:
        match step:
            case PutNode(record):
                known[record.node] = record
            case DropNode(node):
                known.pop(node, None)
            case PutPlacement() | DropPlacement():
                pass
            case _ as unreachable:
                assert_never(unreachable)
    return known


def coalesce(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Only the last step for each key: etcd refuses a transaction that writes one key twice."""
    last: dict[tuple[NodeId, ChunkKey | None], Step] = {}
    for step in steps:
        match step:
            case PutPlacement(placement):
                last[placement.node, placement.chunk.key] = step
            case DropPlacement(key, node):
                last[node, key] = step
            case PutNode(record):
                last[record.node, None] = step
            case DropNode(node):
                last[node, None] = step
            case _ as unreachable:
                assert_never(unreachable)
    return tuple(last.values())


def plan_nodes(
    nodes: NodeRecords,
    present: Mapping[NodeId, int],
    gone: frozenset[NodeId],
    *,
    leading_s: float,
    grace_s: float,
    now_ns: int,
) -> tuple[Step, ...]:
    """Bring the records in line with who is there.

    `present`: nodes heard lately, with their epochs. `gone`: nodes known to be lost or to have left. A node that is in
    neither has not been heard by this leader at all: it counts as lost once the leader has listened for `grace_s`.
    A lost node that comes back in the same epoch still has its chunks, so its placements show again.
    """
    steps: list[Step] = []
    for node, record in nodes.items():
        silent = node in gone or (node not in present and leading_s >= grace_s)
        if record.lost_ns is None and node not in present and silent:
            steps.append(PutNode(msgspec.structs.replace(record, lost_ns=now_ns)))
        elif record.lost_ns is not None and present.get(node) == record.epoch:
            steps.append(PutNode(msgspec.structs.replace(record, lost_ns=None)))
    return tuple(steps)


def sweep_due(nodes: NodeRecords, *, forget_after_s: float, now_ns: int) -> frozenset[NodeId]:
    """Nodes of which placements should be deleted: of older epochs, or all of them if it was lost long ago."""
    return frozenset(
        node for node, record in nodes.items() if record.stale or _forgettable(record, forget_after_s, now_ns)
    )


def plan_sweep(
    placements: Iterable[ChunkPlacement], nodes: NodeRecords, *, forget_after_s: float, now_ns: int
) -> tuple[Step, ...]:
    """What to delete of one page of placements."""
    steps = []
    for placement in placements:
        record = nodes.get(placement.node)
        if record is None or placement.epoch != record.epoch or _forgettable(record, forget_after_s, now_ns):
            steps.append(DropPlacement(placement.chunk.key, placement.node))
    return tuple(steps)


def plan_swept(swept: NodeRecords, nodes: NodeRecords, *, forget_after_s: float, now_ns: int) -> tuple[Step, ...]:
    """How the records read after a whole sweep: forgotten nodes go, the others are clean.

    `swept`: the records as the sweep found them. One that has changed meanwhile is left for the next sweep.
    """
    steps: list[Step] = []
    for node, found in swept.items():
        record = nodes.get(node)
        if record is None or record != found:
            continue
        if _forgettable(record, forget_after_s, now_ns):
            steps.append(DropNode(node))
        elif record.stale:
            steps.append(PutNode(msgspec.structs.replace(record, stale=False)))
    return tuple(steps)


def _forgettable(record: NodeRecord, forget_after_s: float, now_ns: int) -> bool:
    return record.lost_ns is not None and now_ns - record.lost_ns >= forget_after_s * 1e9
