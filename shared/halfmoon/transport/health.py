"""Which paths work: for each peer and transport what was measured, and until when it is set aside. Pure.

A path is a circuit breaker (Nygard, *Release It!*, "Stability Patterns"): closed while it works; open, that is set
aside, after a failure, twice as long each time it fails again; then half open: one batch tries it, and the others wait
for what becomes of it.

    working ──failure──▶ set aside ──time──▶ one batch tries ──success──▶ working
                             ▲                      │
                             └──failure, 2× longer──┘

Times are Unix nanoseconds, passed in; so is the randomness.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from halfmoon.schemas.ids import NodeId

_DEADLINE_WEIGHT = 0.5
"""A read that ran into its deadline may have had a slow peer, or too little time: two of them make a failure."""
_FAIR_CHANCE_NS = 100_000_000
"""A read that was given less than this says nothing about its path by not ending in time."""
_NEWEST_WEIGHT = 0.25
"""Of the newest measurement in the running estimate of bandwidth."""
_MIN_MEASURED_BYTES = 1 << 20
"""What moves less measures latency, not bandwidth."""
_MAX_PEERS = 1024


@dataclass(frozen=True, slots=True)
class Backoff:
    """For how long a failing path is set aside: `first_s`, then twice as long each time, at most `max_s`."""

    first_s: float = 0.25
    max_s: float = 30.0

    def pause_ns(self, num_failures: int, jitter: float) -> int:
        """After so many failures in a row. `jitter`, in [0, 1), takes up to a half off, so that readers spread."""
        longest_s = min(self.max_s, self.first_s * 2.0 ** min(num_failures - 1, 30))
        return int(longest_s * (1.0 - jitter / 2.0) * 1e9)


@dataclass(slots=True)
class PathHealth:
    """One transport to one life of one peer."""

    epoch: int
    weight: float = 0.0
    """Of the failures since the last success; a whole one sets the path aside."""
    failures_in_a_row: int = 0
    set_aside_until_ns: int = 0
    reason: str = ""
    """Of the last failure; empty after a success."""
    is_trying: bool = False
    """One batch is finding out whether it works again."""
    gb_per_s: float | None = None
    """Running estimate; None before the first measurement."""
    num_bytes: int = 0
    busy_s: float = 0.0
    num_failures: int = 0
    num_set_asides: int = 0


@dataclass(slots=True)
class HealthTable:
    """All paths of one reader. Counts are kept over a peer's restarts, judgements aren't."""

    backoff: Backoff = field(default_factory=Backoff)
    _paths: dict[tuple[NodeId, str], PathHealth] = field(default_factory=dict)

    def paths(self) -> Mapping[tuple[NodeId, str], PathHealth]:
        """By peer and transport; those never tried are not in it."""
        return self._paths

    def set_aside(self, peer: NodeId, epoch: int, transport: str, now_ns: int) -> str | None:
        """Why this path isn't to be used now, in a sentence; None where it is."""
        path = self._paths.get((peer, transport))
        if path is None or path.epoch != epoch or not path.failures_in_a_row:
            return None
        if (left_ns := path.set_aside_until_ns - now_ns) > 0:
            return (
                f"set aside for another {left_ns / 1e9:.1f} s after failure "
                f"{path.failures_in_a_row} in a row: {path.reason}"
            )
        return f"being tried again after: {path.reason}" if path.is_trying else None

    def begin(self, peer: NodeId, epoch: int, transport: str) -> None:
        """A batch is about to use this path. To be ended by one of the three below, whatever happens."""
        path = self._path(peer, epoch, transport)
        path.is_trying = path.failures_in_a_row > 0

    def succeeded(self, peer: NodeId, epoch: int, transport: str, *, num_bytes: int, elapsed_ns: int) -> None:
        path = self._path(peer, epoch, transport)
        path.is_trying, path.weight, path.failures_in_a_row, path.reason = False, 0.0, 0, ""
        self._measured(path, num_bytes, elapsed_ns)

    def failed(
        self, peer: NodeId, epoch: int, transport: str, reason: str, *, now_ns: int, jitter: float, num_bytes: int = 0
    ) -> None:
        """It could not reach the peer, or lost it. `num_bytes` had come before."""
        path = self._path(peer, epoch, transport)
        path.num_bytes += num_bytes
        self._blame(path, 1.0, reason, now_ns, jitter)

    def timed_out(
        self, peer: NodeId, epoch: int, transport: str, reason: str, *, now_ns: int, elapsed_ns: int, jitter: float
    ) -> None:
        """The deadline came first, after `elapsed_ns`: half a failure, or none where the time was too short."""
        path = self._path(peer, epoch, transport)
        if elapsed_ns < _FAIR_CHANCE_NS:
            path.is_trying = False
            return
        # A path that failed before and hangs when it is tried again has failed again.
        weight = 1.0 if path.is_trying else _DEADLINE_WEIGHT
        self._blame(path, weight, reason, now_ns, jitter)

    def gave_up(self, peer: NodeId, epoch: int, transport: str) -> None:
        """The batch was cancelled, or answered without any byte: nothing is known that wasn't before."""
        self._path(peer, epoch, transport).is_trying = False

    def _blame(self, path: PathHealth, weight: float, reason: str, now_ns: int, jitter: float) -> None:
        was_trying, path.is_trying = path.is_trying, False
        path.num_failures += 1
        path.reason = reason
        if path.failures_in_a_row and not was_trying and now_ns < path.set_aside_until_ns:
            return  # Batches that were under way when it broke tell nothing new.
        path.weight += weight
        if path.weight < 1.0:
            return
        path.weight = 0.0
        path.failures_in_a_row += 1
        path.num_set_asides += 1
        path.set_aside_until_ns = now_ns + self.backoff.pause_ns(path.failures_in_a_row, jitter)

    def _measured(self, path: PathHealth, num_bytes: int, elapsed_ns: int) -> None:
        path.num_bytes += num_bytes
        path.busy_s += elapsed_ns / 1e9
        if num_bytes < _MIN_MEASURED_BYTES or elapsed_ns <= 0:
            return
        newest = num_bytes / elapsed_ns
        known = path.gb_per_s
        path.gb_per_s = newest if known is None else known + _NEWEST_WEIGHT * (newest - known)

    def _path(self, peer: NodeId, epoch: int, transport: str) -> PathHealth:
        path = self._paths.get((peer, transport))
        if path is None:
            while len(self._paths) >= _MAX_PEERS:
                del self._paths[next(iter(self._paths))]
            path = self._paths[peer, transport] = PathHealth(epoch)
        elif path.epoch < epoch:
            path.epoch, path.weight, path.failures_in_a_row, path.is_trying = epoch, 0.0, 0, False
            path.reason, path.gb_per_s = "", None
        return path
