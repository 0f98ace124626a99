"""How soon are chunks of a kind used again? A model fitted to what has been seen, also of chunks evicted since."""

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

_Table = npt.NDArray[np.float64]
Kind = tuple[int, ...]
"""What a chunk looked like when it was used last, the most telling first: (a, b) is a special case of (a,)."""

_BUCKETS_PER_OCTAVE = 2
NUM_BUCKETS = 24
_FIRST_BOUND_NS = 1_000_000_000
BOUNDS_NS = tuple(int(_FIRST_BOUND_NS * 2 ** (step / _BUCKETS_PER_OCTAVE)) for step in range(NUM_BUCKETS - 1))
"""Bucket b covers the ages [bounds[b - 1], bounds[b]): 1 s, 1.4 s, 2 s, … 34 min; the last one all beyond."""
_WIDTHS_S: _Table = np.diff(np.array([0, *BOUNDS_NS, 2 * BOUNDS_NS[-1]]) / 1e9)
_PRIOR_HAZARD = 0.03
"""Equal in each bucket, and buckets widen with age: the longer unused, the less likely to be used. Which is LRU."""
_PRIOR_CHUNKS = 512.0
"""A kind's own figures outweigh its parent's from so many chunks on. A prompt's chunks live and die together, and a
prompt is tens of chunks, so this is tens of prompts."""
_RECENT_ROUNDS = 4
"""Half-life of what is held to be the present trend: traffic changes faster than the differences between kinds."""


def cell_of(kind: int, age_ns: int) -> int:
    """Kind and age bucket as one number: kind × NUM_BUCKETS + bucket."""
    return kind * NUM_BUCKETS + bisect_right(BOUNDS_NS, age_ns)


class ReuseModel:
    """Discrete-time hazards per kind and age bucket, and what they say that a chunk is worth.

    - **Hazard**: of the chunks of a kind that reached this age unused, the share that was used before the next bucket.
      Those that still wait, or were followed no further, count as long as they were seen (Kaplan and Meier, 1958).
    - **Shrinkage**: a kind's hazards are drawn towards those of its parent, a kind with one feature fewer, up to the
      root, by the weight of `_PRIOR_CHUNKS`. So a new kind starts with what is known of kinds like it.
    - **Worth**: the most uses per second that keeping the chunk can bring, max over t of P(used before t) / E[seconds
      kept until used or t]. It is the hit density of LHD (Beckmann, Chen, Cidon, NSDI '18), with the best horizon
      instead of the eviction age, as in Gittins' index; so it may rise with age, where people take a minute to answer.

    - **Trend**: what has begun lately moves the hazards away from their usual values, a kind by its own figures where
      they are many, else by its parent's.

    What was seen is forgotten by half every `half_life_rounds`; a round is the time between two fits.
    """

    def __init__(self, half_life_rounds: float) -> None:
        self.round = 0
        """The present round: the time since the model was fitted last."""
        self._keep = 0.5 ** (1.0 / half_life_rounds)
        self._keep_recent = 0.5 ** (1.0 / _RECENT_ROUNDS)
        self._ids: dict[Kind, int] = {}
        self._parents: list[int] = []
        self._levels: list[list[int]] = []
        """[number of features]: the kinds that have so many."""
        self._used: list[float] = []
        """[cell]: chunks of that kind used again at that age. A cell is kind × NUM_BUCKETS + bucket."""
        self._ended: list[float] = []
        """[cell]: chunks used again, or followed no further, at that age."""
        self._recent_used: list[float] = []
        self._recent_ended: list[float] = []
        """The same two, each chunk weighted by how recently it began to wait."""
        self._begun: list[int] = []
        """[kind]: chunks used last in the present round and followed still."""
        self._waiting: dict[int, list[int]] = {0: self._begun}
        """round → the same of that round, the earliest first; of those of which chunks still wait, and the present."""
        self._round_ns: dict[int, int] = {0: 0}
        """When each of these rounds began."""
        self._worth: list[float] = []
        """[cell]: uses per second and chunk."""
        self._add_kind(())
        self._fit(0)

    def begin(self, kind: Kind) -> int:
        """A chunk has become one of this kind: its age is zero now. Returns the number of the kind."""
        number = self._ids.get(kind)
        if number is None:
            number = self._add_kind(kind)
        self._begun[number] += 1
        return number

    def end(self, kind: int, began_round: int, age_ns: int, *, used: bool) -> None:
        """A chunk that began in that round is used again at this age, or is followed no further."""
        cell = cell_of(kind, age_ns)
        weight = self._keep_recent ** (self.round - began_round)
        self._ended[cell] += 1.0
        self._recent_ended[cell] += weight
        if used:
            self._used[cell] += 1.0
            self._recent_used[cell] += weight
        self._waiting[began_round][kind] -= 1

    def worth(self, cell: int) -> float:
        """Uses per second and chunk that are to be had from a chunk in this cell."""
        return self._worth[cell]

    def fit(self, now_ns: int) -> None:
        """Begin a new round with what was seen until now."""
        self._fit(now_ns)
        self._used, self._ended = _faded(self._used, self._keep), _faded(self._ended, self._keep)
        self._recent_used = _faded(self._recent_used, self._keep_recent)
        self._recent_ended = _faded(self._recent_ended, self._keep_recent)
        self.round += 1
        self._begun = [0] * len(self._parents)
        self._waiting = {began: counts for began, counts in self._waiting.items() if any(counts)}
        self._waiting[self.round] = self._begun
        self._round_ns = {began: self._round_ns.get(began, now_ns) for began in self._waiting}

    def _add_kind(self, kind: Kind) -> int:
        """It has the worth of its parent until the next fit."""
        parent = 0
        if kind:
            known = self._ids.get(kind[:-1])
            parent = self._add_kind(kind[:-1]) if known is None else known
        number = self._ids[kind] = len(self._parents)
        self._parents.append(parent)
        if len(kind) == len(self._levels):
            self._levels.append([])
        self._levels[len(kind)].append(number)
        for table in (self._used, self._ended, self._recent_used, self._recent_ended):
            table += [0.0] * NUM_BUCKETS
        for counts in self._waiting.values():
            counts.append(0)
        self._worth += self._worth[parent * NUM_BUCKETS : (parent + 1) * NUM_BUCKETS]
        return number

    def _fit(self, now_ns: int) -> None:
        tables = np.array([self._used, self._ended, self._recent_used, self._recent_ended])
        tables = tables.reshape(len(tables), -1, NUM_BUCKETS)
        used, ended, recent_used, recent_ended = tables
        waiting = np.array(list(self._waiting.values()), np.float64)
        weights = np.array([self._keep_recent ** (self.round - began) for began in self._waiting])
        buckets = [bisect_right(BOUNDS_NS, now_ns - self._round_ns[began]) for began in self._waiting]
        # One round after the other, as several are of one bucket.
        np.add.at(ended.T, buckets, waiting)
        np.add.at(recent_ended.T, buckets, waiting * weights[:, np.newaxis])
        for kind in range(len(self._parents) - 1, 0, -1):
            tables[:, self._parents[kind]] += tables[:, kind]
        hazard = self._hazards(used, _at_risk(used, ended), recent_used, _at_risk(recent_used, recent_ended))
        self._worth = _best_density(np.clip(hazard, 0.0, 1.0)).ravel().tolist()

    def _hazards(self, used: _Table, at_risk: _Table, recent_used: _Table, recent_at_risk: _Table) -> _Table:
        """[kind][bucket], from the root down: each level leans on the one above."""
        usual, hazard = np.empty_like(used), np.empty_like(used)
        parents = np.array(self._parents)
        for level, kinds in enumerate(self._levels):
            above = parents[kinds]
            prior = usual[above] if level else _PRIOR_HAZARD
            trend = hazard[above] / usual[above] if level else 1.0
            usual[kinds] = (used[kinds] + _PRIOR_CHUNKS * prior) / (at_risk[kinds] + _PRIOR_CHUNKS)
            expected = np.minimum(usual[kinds] * trend, 1.0)
            hazard[kinds] = (recent_used[kinds] + _PRIOR_CHUNKS * expected) / (recent_at_risk[kinds] + _PRIOR_CHUNKS)
        return hazard


def _faded(counts: list[float], keep: float) -> list[float]:
    return [count * keep for count in counts]


def _at_risk(used: _Table, ended: _Table) -> _Table:
    """[…][bucket]: chunks that reached this age; those not used again in their last bucket count half for it."""
    reached = np.flip(np.cumsum(np.flip(ended, axis=-1), axis=-1), axis=-1)
    return reached - 0.5 * (ended - used)


def _best_density(hazard: _Table) -> _Table:
    """[kind][bucket] hazards → [kind][bucket] uses per second, at the best horizon from each bucket on."""
    unused = np.cumprod(1.0 - hazard, axis=1)
    before = np.concatenate([np.ones((len(hazard), 1)), unused[:, :-1]], axis=1)
    uses = np.cumsum(before * hazard, axis=1)
    seconds = np.cumsum(before * _WIDTHS_S * (1.0 - hazard / 2), axis=1)
    # [horizon][kind][bucket]. A horizon before the bucket gains nothing, so it is never the best one.
    gained = uses.T[:, :, np.newaxis] - _up_to(uses)
    spent = seconds.T[:, :, np.newaxis] - _up_to(seconds)
    np.maximum(spent, 1e-12, out=spent)
    density: _Table = np.max(np.divide(gained, spent, out=gained), axis=0)
    return density


def _up_to(total: _Table) -> _Table:
    """[kind][bucket] totals up to a bucket's end → up to its beginning."""
    return np.concatenate([np.zeros((len(total), 1)), total[:, :-1]], axis=1)
