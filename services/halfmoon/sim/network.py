"""NICs, shared by all that a node sends or receives."""

from halfmoon.schemas.ids import NodeId


class Network:
    """Each direction of a NIC carries one transfer after the other, at full speed: a transfer is through when both its
    ends have carried it. So no NIC ever carries more than it can, and none idles while something waits for it alone.
    """

    def __init__(self, bytes_per_s: float, latency_s: float = 0.001) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._out_free_s: dict[NodeId, float] = {}
        self._in_free_s: dict[NodeId, float] = {}

    def send(self, source: NodeId, destination: NodeId, num_bytes: float, now_s: float) -> float:
        """When it will have come. 0 seconds on one node."""
        if source == destination or num_bytes <= 0:
            return now_s
        took_s = num_bytes / self._bytes_per_s
        out = self._out_free_s[source] = max(now_s, self._out_free_s.get(source, 0.0)) + took_s
        into = self._in_free_s[destination] = max(now_s, self._in_free_s.get(destination, 0.0)) + took_s
        return max(out, into) + self._latency_s

    def estimate_s(self, source: NodeId, destination: NodeId, num_bytes: float, now_s: float) -> float:
        """Seconds that it would take if it began now."""
        if source == destination or num_bytes <= 0:
            return 0.0
        wait_s = max(self._out_free_s.get(source, 0.0), self._in_free_s.get(destination, 0.0)) - now_s
        return max(0.0, wait_s) + num_bytes / self._bytes_per_s + self._latency_s

    def through_s(self, num_bytes: float) -> float:
        """Seconds from end to end where nothing else is under way."""
        return num_bytes / self._bytes_per_s + self._latency_s

    def backlog_s(self, source: NodeId, now_s: float) -> float:
        """What the node still has to send."""
        return max(0.0, self._out_free_s.get(source, 0.0) - now_s)
