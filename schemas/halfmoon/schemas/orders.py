"""Standing orders of the operator: what is pinned, and what was flushed.

The registry keeps them in etcd, so that they also reach nodes that were away when they were given. Each has a number,
and heartbeats say up to which number its sender has carried them out.
"""

from halfmoon.schemas.ids import ChunkKey, ModelName, TenantId, WorkerId
from halfmoon.schemas.wire import Message


class Selection(Message, frozen=True):
    """Which chunks are meant: those that meet all that is given. Where nothing is given, none."""

    tenant: TenantId | None = None
    """Computed for this tenant."""
    model: ModelName | None = None
    keys: tuple[ChunkKey, ...] = ()
    """These chunks, …"""
    prefixes: tuple[ChunkKey, ...] = ()
    """… or these and all that follow them in any prompt."""
    everything: bool = False

    @property
    def is_empty(self) -> bool:
        return not (self.everything or self.tenant or self.model or self.keys or self.prefixes)


class FlushOrder(Message, frozen=True):
    """What of these chunks was there before that time must not be served any more."""

    seq: int
    before_ns: int
    """Unix time, by the clock of the registry that took the order."""
    selection: Selection
    is_merged: bool = False
    """It stands for many older orders, and selects more than they did: not meant for those who carried them out."""


class PinOrder(Message, frozen=True):
    """Every copy of this chunk stays until it is unpinned."""

    key: ChunkKey
    model: ModelName | None = None
    tenant: TenantId | None = None
    """Known of what was pinned as a prompt; a flush of a tenant or model also ends its pins."""
    parent: ChunkKey | None = None
    """The chunk before it, where it was pinned as part of a prompt."""


class Forget(Message, frozen=True, tag="worker.forget.v1"):
    """To a worker: find nothing any more of what the engine's own prefix cache holds now and the order may select."""

    order: FlushOrder


class Forgotten(Message, frozen=True, tag="worker.forgotten.v1"):
    worker: WorkerId
    num_chunks: int
    """That were known to be in the prefix cache; 0 for an engine without one."""
