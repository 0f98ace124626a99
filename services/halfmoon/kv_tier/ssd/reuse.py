"""How far apart the uses of a chunk are, and what follows from that for demotion and promotion. Pure.

A distance is counted in chunks: those that the pool took in between two uses of one chunk, by different requests. It is
what a pool must have room for, beside the chunk, so that the chunk is still there; it doesn't change with the speed of
the traffic, as a time would.

    memory  every chunk lately registered, in DRAM or not, and where the clock of chunks stood when it was last used
       │
       ├─ distances ──▶ low watermark: as many slots are kept free as cost no more than 1 % of all reuses
       ├─ ages at which DRAM gives chunks up ──▶ reach: promote what comes back sooner than DRAM would forget it
       └─ chunks given up unused, and those of them that came back ──▶ is a chunk used once worth an SSD write?
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

from halfmoon.schemas.ids import ChunkKey, RequestId

_PER_OCTAVE = 8
_NUM_BUCKETS = 40 * _PER_OCTAVE
_FORGET_AFTER = 8192
"""Counts are halved after so many: the newest traffic weighs most."""
_MIN_MEMORY = 4096
_MAX_MEMORY = 262_144
_MEMORY_PER_SLOT = 4
_AGE_WEIGHT = 1 / 64
_RETURNED_WORTH = 1 / 8
"""Write what was used once where at least so much of it comes back: computing a chunk takes many times as long as
writing one, which nobody waits for."""
_PRIOR_ONCE = 32
"""Chunks given up unused that are assumed not to have come back, before anything is known."""
_SHARES_FREE = (1 / 4, 1 / 8, 1 / 16, 1 / 32)
_LOST_REUSES = 0.01


class Admission(StrEnum):
    AUTO = "auto"
    """Chunks that were used again; and, while enough of the others come back, those too."""
    REUSED = "reused"
    ALL = "all"


class Distances:
    """A histogram, eight buckets per doubling, in which old counts fade."""

    def __init__(self) -> None:
        self._counts = [0.0] * _NUM_BUCKETS
        self._total = 0.0

    @property
    def total(self) -> float:
        """How many are remembered."""
        return self._total

    def note(self, distance: int) -> None:
        self._counts[min(_NUM_BUCKETS - 1, int(_PER_OCTAVE * math.log2(distance + 1)))] += 1
        self._total += 1
        if self._total >= _FORGET_AFTER:
            self._counts = [count / 2 for count in self._counts]
            self._total /= 2

    def share_between(self, low: float, high: float) -> float:
        """Of all that are remembered, those in [low, high); 0 where none are."""
        if not self._total:
            return 0.0
        return (self._below(high) - self._below(low)) / self._total

    def _below(self, distance: float) -> float:
        """Within a bucket they are taken to lie evenly."""
        place = _PER_OCTAVE * math.log2(distance + 1)
        bucket = min(_NUM_BUCKETS - 1, int(place))
        start, end = (2 ** (edge / _PER_OCTAVE) - 1 for edge in (bucket, bucket + 1))
        return sum(self._counts[:bucket]) + self._counts[bucket] * (distance - start) / (end - start)


@dataclass(slots=True)
class _Known:
    at: int
    """Of the clock, at the last use."""
    request_id: RequestId
    num_uses: int = 0
    """By other requests than the one that made it."""
    was_given_up: bool = False
    """By DRAM, before any use."""


class ReuseMemory:
    """What a pool's chunks were used for, as long as it remembers: about four times what DRAM holds."""

    def __init__(self, num_slots: int, admission: Admission = Admission.AUTO) -> None:
        self._capacity = min(_MAX_MEMORY, max(_MIN_MEMORY, _MEMORY_PER_SLOT * num_slots))
        self._known: OrderedDict[ChunkKey, _Known] = OrderedDict()
        self._num_slots = num_slots
        self._admission = admission
        self.clock = 0
        """Chunks registered so far."""
        self.distances = Distances()
        self._reach = float(num_slots)
        self._num_once = float(_PRIOR_ONCE)
        self._num_returned = 0.0

    def came(self, key: ChunkKey, request_id: RequestId, *, is_new: bool) -> None:
        """A chunk is registered on behalf of this request. `is_new`: computed, not brought from elsewhere."""
        if is_new and key in self._known:
            self.used(key, request_id)
        self.clock += 1
        known = self._known.get(key)
        if known is None:
            self._known[key] = _Known(self.clock, request_id)
            if len(self._known) > self._capacity:
                self._known.popitem(last=False)
        else:
            known.at = self.clock

    def used(self, key: ChunkKey, request_id: RequestId) -> None:
        """This request asks for a chunk, wherever it is now."""
        known = self._known.get(key)
        if known is None or known.request_id == request_id:
            return
        self.distances.note(self.clock - known.at)
        known.at, known.request_id = self.clock, request_id
        known.num_uses += 1
        self._known.move_to_end(key)
        if known.was_given_up:
            known.was_given_up = False
            self._num_returned += 1

    def given_up(self, key: ChunkKey) -> None:
        """DRAM lets a chunk go, because it needs the room."""
        known = self._known.get(key)
        if known is None:
            return
        self._reach += _AGE_WEIGHT * (self.clock - known.at - self._reach)
        if not known.num_uses and not known.was_given_up:
            known.was_given_up = True
            self._num_once += 1
            if self._num_once >= _FORGET_AFTER:
                self._num_once, self._num_returned = self._num_once / 2, self._num_returned / 2

    def is_worth_writing(self, key: ChunkKey) -> bool:
        """The admission filter: whether a chunk that leaves DRAM is to go to the SSD."""
        match self._admission:
            case Admission.ALL:
                return True
            case Admission.REUSED:
                return self.num_uses(key) > 0
            case Admission.AUTO:
                return self.num_uses(key) > 0 or self.share_returned >= _RETURNED_WORTH

    def num_uses(self, key: ChunkKey) -> int:
        known = self._known.get(key)
        return 0 if known is None else known.num_uses

    @property
    def share_returned(self) -> float:
        """Of the chunks that DRAM gave up unused, those that were wanted later."""
        return self._num_returned / self._num_once

    @property
    def reach(self) -> int:
        """Chunks that the pool takes in until DRAM gives up one that isn't used: a running mean."""
        return max(1, round(self._reach))

    def share_to_free(self) -> float:
        """The largest share of DRAM that may be kept free at the cost of at most 1 % of all reuses.

        An LRU pool with that share less would serve the reuses in [(1 - share) × slots, slots) from SSD instead.
        """
        for share in _SHARES_FREE:
            if self.distances.share_between((1 - share) * self._num_slots, self._num_slots) <= _LOST_REUSES:
                return share
        return _SHARES_FREE[-1]


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Shares of DRAM in use: demotion begins above `high` and goes on until `low`."""

    high: float
    low: float


def adapted(memory: ReuseMemory, num_slots: int, burst: float) -> Watermarks:
    """Watermarks for the traffic seen: room for bursts of `burst` slots, where reuse leaves it."""
    most = memory.share_to_free()
    share = min(most, max(_SHARES_FREE[-1], 2 * burst / num_slots))
    return Watermarks(high=1 - share / 2, low=1 - share)


class Pressure:
    """How many slots to free now: none until DRAM is above the high watermark, then all above the low one."""

    def __init__(self) -> None:
        self._is_on = False

    def num_excess(self, in_use: int, total: int, marks: Watermarks) -> int:
        if in_use > marks.high * total:
            self._is_on = True
        excess = in_use - math.floor(marks.low * total)
        if excess <= 0:
            self._is_on = False
        return excess if self._is_on else 0


class Burst:
    """The most slots lately taken between two looks; what is long past counts half as much every `half_life` looks."""

    def __init__(self, half_life: int) -> None:
        self._keep = 0.5 ** (1 / half_life)
        self._free: int | None = None
        self.num_slots = 0.0

    def look(self, free: int) -> None:
        taken = 0 if self._free is None else self._free - free
        self._free = free
        self.num_slots = max(float(taken), self.num_slots * self._keep)
