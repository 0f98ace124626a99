"""What is on its way to this node, and how long it took: for the cost models of those who place requests. Pure."""

from collections import Counter, deque

from halfmoon.schemas.ids import NodeId
from halfmoon.schemas.measurements import PullSample

MAX_SAMPLES = 16
"""Per heartbeat."""
_NS_PER_S = 1e9


class Pulling:
    """One batch from one source."""

    def __init__(self, flow: "Flow", source: NodeId, num_bytes: int, began_ns: int, num_bytes_ahead: int) -> None:
        self._flow = flow
        self._source = source
        self._num_bytes = num_bytes
        self._began_ns = began_ns
        self._num_bytes_ahead = num_bytes_ahead

    def end(self, now_ns: int, *, is_whole: bool) -> None:
        """To be called once, whatever becomes of it. `is_whole`: all of it has come, so that its time tells."""
        sample = PullSample(
            source=self._source,
            num_bytes=self._num_bytes,
            duration_s=max(0, now_ns - self._began_ns) / _NS_PER_S,
            num_bytes_ahead=self._num_bytes_ahead,
        )
        self._flow.ended(sample, is_whole=is_whole)


class Flow:
    """All batches of one pool."""

    def __init__(self) -> None:
        self._under_way: Counter[NodeId] = Counter()
        self._samples: deque[PullSample] = deque(maxlen=MAX_SAMPLES)

    def begin(self, source: NodeId, num_bytes: int, now_ns: int) -> Pulling:
        pulling = Pulling(self, source, num_bytes, now_ns, self._under_way.total())
        self._under_way[source] += num_bytes
        return pulling

    def ended(self, sample: PullSample, *, is_whole: bool) -> None:
        self._under_way[sample.source] -= sample.num_bytes
        if is_whole:
            self._samples.append(sample)

    def measured(self, sample: PullSample) -> None:
        """Something else that was timed: a read from this node's own SSD."""
        self._samples.append(sample)

    def receiving(self) -> dict[NodeId, int]:
        """Bytes under way, by source."""
        return {source: num_bytes for source, num_bytes in self._under_way.items() if num_bytes}

    def take(self) -> tuple[PullSample, ...]:
        """The samples since the last call."""
        taken = tuple(self._samples)
        self._samples.clear()
        return taken
