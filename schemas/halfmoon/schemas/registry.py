"""What the registry is asked, and answers, on `halfmoon.registry.<verb>`; and what it announces."""

import msgspec

from halfmoon.schemas.chunks import ChunkPlacement
from halfmoon.schemas.ids import ChunkKey, NodeId, WorkerId
from halfmoon.schemas.kv_tier import TierFlush
from halfmoon.schemas.members import NodeHeartbeat, ServiceHeartbeat, WorkerHeartbeat
from halfmoon.schemas.orders import FlushOrder, PinOrder, Selection
from halfmoon.schemas.wire import Error, Message


class Lookup(Message, frozen=True, tag="registry.lookup.v1"):
    keys: tuple[ChunkKey, ...]
    """At most 1,024."""


class LookedUp(Message, frozen=True, tag="registry.lookedup.v1"):
    placements: tuple[tuple[ChunkPlacement, ...], ...]
    """For each key asked, in order."""


class Snapshot(Message, frozen=True, tag="registry.snapshot.v1"):
    """One page of all placements. First page: no cursor. Then the cursor and revision of the page before."""

    cursor: bytes | None = None
    revision: int | None = None
    limit: int = 5000


class SnapshotPage(Message, frozen=True, tag="registry.page.v1"):
    revision: int
    """All pages are read at this etcd revision."""
    stream_seq: int
    """The last event of `CHUNKS` that the snapshot includes: follow from the one after it."""
    placements: tuple[ChunkPlacement, ...]
    cursor: bytes | None
    """None on the last page."""
    epochs: dict[NodeId, int] = msgspec.field(default_factory=dict)
    """On the first page: the newest epoch of every node, also of those without placements. Events of older ones that
    come later in the stream mean nothing."""
    lost: tuple[NodeId, ...] = ()
    """On the first page: nodes that are taken for lost. Their placements are left out, and shown again should they come
    back in the same epoch."""


class Members(Message, frozen=True, tag="registry.members.v1"):
    pass


class MemberList(Message, frozen=True, tag="registry.memberlist.v1"):
    """Everybody whose etcd lease lives, with the last heartbeat that was recorded (up to a second old)."""

    members: tuple[WorkerHeartbeat | NodeHeartbeat | ServiceHeartbeat, ...]


class MemberJoined(Message, frozen=True, tag="member.joined.v1"):
    worker: WorkerId
    node: NodeId | None = None
    """Set where the member is this node's pool."""


class MemberLost(Message, frozen=True, tag="member.lost.v1"):
    worker: WorkerId
    node: NodeId | None = None
    """Set where this node's pool went with it; not for other workers, and not where a new life of the pool is there."""
    reason: str = ""


class Flush(Message, frozen=True, tag="registry.flush.v1"):
    """Let nobody find these chunks any more: on every node, in every tier, and in the engines' own caches."""

    selection: Selection


class NodeFlush(Message, frozen=True):
    """What a flush did at one node."""

    node: NodeId
    tiers: tuple[TierFlush, ...] = ()
    num_leased: int = 0
    error: str = ""
    """Why the node did not answer. It gets the order when it is back, before it serves."""


class WorkerFlush(Message, frozen=True):
    """What a flush did in one engine's own prefix cache."""

    worker: WorkerId
    num_chunks: int = 0
    error: str = ""


class Flushed(Message, frozen=True, tag="registry.flushed.v1"):
    seq: int
    before_ns: int
    nodes: tuple[NodeFlush, ...]
    workers: tuple[WorkerFlush, ...] = ()
    num_unpinned: int = 0
    """Pins that ended with it."""


class Pin(Message, frozen=True, tag="registry.pin.v1"):
    """Keep these chunks on every node that has them, or gets them."""

    chunks: tuple[PinOrder, ...]


class Unpin(Message, frozen=True, tag="registry.unpin.v1"):
    """Let eviction take these chunks again, as far as they are pinned."""

    selection: Selection


class NodePins(Message, frozen=True):
    """What became of the chunks at one node: see `kvtier.pins.v1`."""

    node: NodeId
    num_pinned: int = 0
    num_absent: int = 0
    num_refused: int = 0
    max_slots: int = 0
    error: str = ""
    """Why the node did not answer. It gets the order when it is back."""


class PinsChanged(Message, frozen=True, tag="registry.pins.v1"):
    seq: int
    num_changed: int
    """Pins that are new, or have ended."""
    num_pins: int
    """All there are now."""
    nodes: tuple[NodePins, ...] = ()


class Orders(Message, frozen=True, tag="registry.orders.v1"):
    """What is pinned, and what was flushed since?"""

    after: int = 0
    """Number of the last order that the asker has carried out."""


class StandingOrders(Message, frozen=True, tag="registry.standing.v1"):
    seq: int
    flushes: tuple[FlushOrder, ...]
    """After the number asked, oldest first."""
    pins: tuple[PinOrder, ...]
    """All of them."""


RegistryRequest = Lookup | Snapshot | Members | Flush | Pin | Unpin | Orders
RegistryReply = LookedUp | SnapshotPage | MemberList | Flushed | PinsChanged | StandingOrders | Error
MemberEvent = MemberJoined | MemberLost
