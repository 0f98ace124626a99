"""How two nodes set up RDMA between them: verbs `rdma_*` of `halfmoon.kvtier.<node>.<verb>`.

    reader ── RdmaHello ──▶ server ── RdmaChallenge {nonce} ──▶ reader
    reader ── RdmaConnect {both nonces, its queue pairs} ──▶ server ── RdmaConnected {its queue pairs, addresses, keys}
    reader ── RdmaGrant {lease, slots} ──▶ server ── RdmaGranted {a key per slot, or why not}     before each batch
    reader ── RdmaDisconnect ──▶ server                                                           when it has done

`proof` is HMAC-SHA256(cluster secret, the message with an empty proof): see `halfmoon.transport.rdma.proofs`. The bytes
themselves then move by one-sided READs, of which the server's processor hears nothing.
"""

from enum import StrEnum

from halfmoon.schemas.ids import LeaseId, NodeId
from halfmoon.schemas.wire import Message


class LinkLayer(StrEnum):
    ETHERNET = "ethernet"
    """RoCE."""
    INFINIBAND = "infiniband"


class RdmaPort(Message, frozen=True):
    """One port of one device, and the address that it is reached by."""

    device: str
    port: int
    link_layer: LinkLayer
    gid: bytes
    """16 bytes; on RoCE v2 an IPv6 address, or an IPv4 one mapped into it."""
    gid_index: int
    lid: int = 0
    """Address within an InfiniBand subnet; 0 on RoCE."""
    mtu_bytes: int = 1024
    speed_mbps: int = 0
    """0: unknown."""
    numa_node: int | None = None
    """Where the device is plugged in; None where the machine doesn't say."""
    pci_address: str | None = None
    max_reads: int = 1
    """READs that the device answers at once, per queue pair."""
    max_initiated_reads: int = 1
    """READs that it has on their way at once, per queue pair."""
    max_message_bytes: int = 1 << 20
    """Of one READ."""


class RdmaOffer(Message, frozen=True):
    """What a node can be read by."""

    ports: tuple[RdmaPort, ...]
    windows: bool = False
    """Whether each lease is opened to its reader alone, by memory windows; otherwise a key opens the whole arena."""


class QueuePairEnd(Message, frozen=True):
    """One end of a connected pair."""

    port: RdmaPort
    number: int
    """24 bits."""
    first_sequence: int
    """The packet sequence number that this end begins to send at: 24 bits."""


class WantedQueuePair(Message, frozen=True):
    """The reader's end, and which of the server's devices the other end is to be made on."""

    end: QueuePairEnd
    device: str
    port: int


class RdmaHello(Message, frozen=True, tag="kvtier.rdma_hello.v1"):
    """Before a connection: asks for a nonce, which is good for one `RdmaConnect`, soon."""

    reader: str


class RdmaChallenge(Message, frozen=True, tag="kvtier.rdma_challenge.v1"):
    node: NodeId
    epoch: int
    nonce: bytes


class RdmaConnect(Message, frozen=True, tag="kvtier.rdma_connect.v1"):
    """Connect these queue pairs of the reader."""

    reader: str
    node: NodeId
    epoch: int
    """Of the server, as the reader knows it."""
    server_nonce: bytes
    reader_nonce: bytes
    queue_pairs: tuple[WantedQueuePair, ...]
    proof: bytes = b""


class RdmaConnected(Message, frozen=True, tag="kvtier.rdma_connected.v1"):
    """The other ends, in the order asked, and where the arena lies."""

    connection: bytes
    """Names this connection from now on."""
    reader_nonce: bytes
    queue_pairs: tuple[QueuePairEnd, ...]
    arena_address: int
    """Of slot 0 in the server's memory; the table of generations follows behind the last slot."""
    table_keys: tuple[int, ...]
    """Opens the table of generations, per queue pair."""
    proof: bytes = b""


class RdmaRange(Message, frozen=True):
    """A slot that is to be read up to byte `end`, over one of the connection's queue pairs."""

    slot: int
    generation: int
    end: int
    queue_pair: int


class RdmaGrant(Message, frozen=True, tag="kvtier.rdma_grant.v1"):
    """Open these slots, which the lease covers; what an earlier grant opened on this connection is closed."""

    connection: bytes
    sequence: int
    """Rises with each grant of a connection."""
    lease_id: LeaseId
    ranges: tuple[RdmaRange, ...]
    proof: bytes = b""


class RdmaVerdict(StrEnum):
    OPEN = "open"
    STALE = "stale"
    REFUSED = "refused"


class RdmaAccess(Message, frozen=True):
    """What became of one range."""

    verdict: RdmaVerdict
    key: int = 0
    """Opens the range, where the verdict is `open`."""
    detail: str = ""


class RdmaGranted(Message, frozen=True, tag="kvtier.rdma_granted.v1"):
    connection: bytes
    sequence: int
    access: tuple[RdmaAccess, ...]
    """In the order asked."""
    proof: bytes = b""


class RdmaDisconnect(Message, frozen=True, tag="kvtier.rdma_disconnect.v1"):
    """The reader needs this connection no more."""

    connection: bytes
    proof: bytes = b""


RdmaRequest = RdmaHello | RdmaConnect | RdmaGrant | RdmaDisconnect

RdmaReply = RdmaChallenge | RdmaConnected | RdmaGranted
