"""Finding out how well one node reads from another: the verb `probe` of `halfmoon.kvtier.<node>.<verb>`."""

from halfmoon.schemas.ids import NodeId
from halfmoon.schemas.wire import Message


class Probe(Message, frozen=True, tag="kvtier.probe.v1"):
    """Tell about this node; with a peer, read from it by each transport and measure that."""

    peer: NodeId | None = None
    num_bytes: int = 256 << 20
    """To read at most, by each transport. 0: only say which could be used."""
    time_limit_s: float = 1.0
    """For each transport."""


class ProbedPath(Message, frozen=True):
    """One transport to the peer."""

    transport: str
    is_usable: bool
    reason: str = ""
    """Why it isn't, or wasn't measured."""
    gb_per_s: float | None = None
    """Measured just now; None where it wasn't."""
    num_bytes: int = 0
    slice_bytes: int = 0
    """Of one slot that was read: small ones measure the way to them rather than bandwidth."""


class Probed(Message, frozen=True, tag="kvtier.probed.v1"):
    node: NodeId
    epoch: int
    host: str
    now_ns: int
    """This node's clock, Unix time."""
    memory_dir: str
    """Where its arena lies."""
    memory_total_bytes: int
    """Of that file system."""
    memory_free_bytes: int
    peer: NodeId | None = None
    paths: tuple[ProbedPath, ...] = ()
    """Best first."""
    chosen: str | None = None
    """The transport that this node would read with now. None: there is no way."""
    detail: str = ""
    """Why there are no paths."""
