"""Where everything lies in etcd.

<prefix>/chunks/<key hex>/<node>   ChunkPlacement     all copies of one chunk are one range
<prefix>/nodes/<node>              NodeRecord         epoch, lost or not: decides which placements count
<prefix>/members/<worker>          Heartbeat          under a lease of `member_ttl_s`, a new one each second
<prefix>/applied                   Stamp              the last event of CHUNKS that is in here
<prefix>/leader                    worker id, lease   under the leader's lease
<prefix>/orders/last               number             of the last standing order
<prefix>/orders/flushes/<number>   FlushOrder         what must not come back, for nodes that were away
<prefix>/orders/pins/<key hex>     PinOrder           what every node keeps
"""

from halfmoon.registry.etcd import Range, prefix_end
from halfmoon.schemas.ids import ChunkKey, NodeId, WorkerId


class Keys:
    """The keys of one deployment."""

    def __init__(self, prefix: str) -> None:
        root = prefix.rstrip("/").encode()
        self.chunks = root + b"/chunks/"
        self.nodes = root + b"/nodes/"
        self.members = root + b"/members/"
        self.applied = root + b"/applied"
        self.leader = root + b"/leader"
        self.last_order = root + b"/orders/last"
        self.flushes = root + b"/orders/flushes/"
        self.pins = root + b"/orders/pins/"

    def chunk(self, key: ChunkKey) -> bytes:
        """Prefix of all copies of one chunk."""
        return self.chunks + key.hex().encode() + b"/"

    def placement(self, key: ChunkKey, node: NodeId) -> bytes:
        return self.chunk(key) + node.encode()

    def node(self, node: NodeId) -> bytes:
        return self.nodes + node.encode()

    def member(self, worker: WorkerId) -> bytes:
        return self.members + worker.encode()

    def flush(self, seq: int) -> bytes:
        return self.flushes + f"{seq:020d}".encode()

    def pin(self, key: ChunkKey) -> bytes:
        return self.pins + key.hex().encode()


def all_under(prefix: bytes) -> Range:
    return Range(prefix, prefix_end(prefix))


def reads_of_orders(keys: Keys) -> list[Range]:
    """In the order that `Values.orders` takes them."""
    return [Range(keys.last_order), all_under(keys.flushes), all_under(keys.pins)]
