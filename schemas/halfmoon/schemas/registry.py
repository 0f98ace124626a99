"""What the registry is asked, and answers, on `halfmoon.registry.<verb>`; and what it announces."""

import msgspec

from halfmoon.schemas.chunks import ChunkPlacement
from halfmoon.schemas.ids import ChunkKey, NodeId, WorkerId
from halfmoon.schemas.members import NodeHeartbeat, ServiceHeartbeat, WorkerHeartbeat
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


RegistryRequest = Lookup | Snapshot | Members
RegistryReply = LookedUp | SnapshotPage | MemberList | Error
MemberEvent = MemberJoined | MemberLost
