"""How soon are chunks of a kind used again? A model fitted to what has been seen, also of chunks evicted since."""

from bisect import bisect_right
from collections import Counter
from itertools import chain

import numpy as np
import numpy.typing as npt

_Table = npt.NDArray[np.float64]
Kind = tuple[int, ...]
"""What a chunk looked like when it was used last, the most telling first: (a, b) is a special case of (a,)."""

_BUCKETS_PER_OCTAVE = 2
_NUM_BUCKETS = 24
_FIRST_BOUND_NS = 1_000_000_000
_BOUNDS_NS = tuple(int(_FIRST_BOUND_NS * 2 ** (step / _BUCKETS_PER_OCTAVE)) for step in range(_NUM_BUCKETS - 1))
"""Bucket b covers the ages [bounds[b - 1], bounds[b]): 1 s, 1.4 s, 2 s, … 34 min; the last one all beyond."""
_PRIOR_HAZARD = 0.03
"""Equal in each bucket, and buckets widen with age: the longer unused, the less likely to be used. Which is LRU."""
_PRIOR_CHUNKS = 512.0
"""A kind's own figures outweigh its parent's from so many chunks on. A prompt's chunks live and die together, and a
prompt is tens of chunks, so this is tens of prompts."""
_RECENT_ROUNDS = 4
"""Half-life of what is held to be the present trend: traffic changes faster than the differences between kinds."""


def bucket_of(age_ns: int) -> int:
    """The bucket of an age, in 0..23."""
    return bisect_right(_BOUNDS_NS, age_ns)


def bucket_end_ns(bucket: int) -> int | None:
    """The age that leaves this bucket; None for the last one."""
    return _BOUNDS_NS[bucket] if bucket < len(_BOUNDS_NS) else None


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
        self._keep = 0.5 ** (1.0 / half_life_rounds)
        self._keep_recent = 0.5 ** (1.0 / _RECENT_ROUNDS)
        self._ids: dict[Kind, int] = {}
        self._parents: list[int] = []
        self._used: list[list[float]] = []
        """[kind][bucket]: chunks used again at that age."""
        self._ended: list[list[float]] = []
        """[kind][bucket]: chunks used again, or followed no further, at that age."""
        self._recent_used: list[list[float]] = []
        self._recent_ended: list[list[float]] = []
        """The same two, each chunk weighted by how recently it began to wait."""
        self._waiting: Counter[tuple[int, int]] = Counter()
        """(kind, round) → chunks used last in that round and followed still."""
        self._round_ns: dict[int, int] = {0: 0}
        """When each round began of which chunks still wait, and the present one."""
        self._round = 0
        self._worth: list[list[float]] = []
        self.kind_id(())
        self._worth = self._fit(0)

    @property
    def round(self) -> int:
        """The present round: the time since the model was fitted last."""
        return self._round

    def kind_id(self, kind: Kind) -> int:
        """A number for this kind; a new kind gets the worth of its parent until the next fit."""
        known = self._ids.get(kind)
        if known is not None:
            return known
        parent = self.kind_id(kind[:-1]) if kind else 0
        number = len(self._parents)
        self._ids[kind] = number
        self._parents.append(parent)
        self._used.append([0.0] * _NUM_BUCKETS)
        self._ended.append([0.0] * _NUM_BUCKETS)
        self._recent_used.append([0.0] * _NUM_BUCKETS)
        self._recent_ended.append([0.0] * _NUM_BUCKETS)
        if self._worth:
            self._worth.append(self._worth[parent])
        return number

    def begin(self, kind: int) -> None:
        """A chunk has become one of this kind: its age is zero now."""
        self._waiting[kind, self._round] += 1

    def end(self, kind: int, began_round: int, age_ns: int, *, used: bool) -> None:
        """A chunk that began in that round is used again at this age, or is followed no further."""
        bucket = bucket_of(age_ns)
        self._ended[kind][bucket] += 1.0
        if used:
            self._used[kind][bucket] += 1.0
        weight = self._keep_recent ** (self._round - began_round)
        self._recent_ended[kind][bucket] += weight
        if used:
            self._recent_used[kind][bucket] += weight
        left = self._waiting[kind, began_round] - 1
        if left:
            self._waiting[kind, began_round] = left
        else:
            del self._waiting[kind, began_round]

    def worth(self, kind: int, bucket: int) -> float:
        """Uses per second and chunk that are to be had from a chunk of this kind and age."""
        return self._worth[kind][bucket]

    def fit(self, now_ns: int) -> None:
        """Begin a new round with what was seen until now."""
        self._worth = self._fit(now_ns)
        for keep, tables in (
            (self._keep, (self._used, self._ended)),
            (self._keep_recent, (self._recent_used, self._recent_ended)),
        ):
            for row in chain.from_iterable(tables):
                row[:] = [count * keep for count in row]
        self._round += 1
        awaited = {began for _, began in self._waiting}
        self._round_ns = {number: at for number, at in self._round_ns.items() if number in awaited}
        self._round_ns[self._round] = now_ns

    def _fit(self, now_ns: int) -> list[list[float]]:
        used, ended = np.array(self._used), np.array(self._ended)
        recent_used, recent_ended = np.array(self._recent_used), np.array(self._recent_ended)
        for (kind, began), count in self._waiting.items():
            bucket = bucket_of(now_ns - self._round_ns[began])
            ended[kind, bucket] += count
            recent_ended[kind, bucket] += count * self._keep_recent ** (self._round - began)
        for kind in range(len(self._parents) - 1, 0, -1):
            for table in (used, ended, recent_used, recent_ended):
                table[self._parents[kind]] += table[kind]
        at_risk, recent_at_risk = _at_risk(used, ended), _at_risk(recent_used, recent_ended)
        usual = np.empty_like(used)
        hazard = np.empty_like(used)
        for kind, parent in enumerate(self._parents):
            prior = usual[parent] if kind else np.full(_NUM_BUCKETS, _PRIOR_HAZARD)
            usual[kind] = (used[kind] + _PRIOR_CHUNKS * prior) / (at_risk[kind] + _PRIOR_CHUNKS)
            trend = hazard[parent] / usual[parent] if kind else 1.0
            expected = np.minimum(usual[kind] * trend, 1.0)
            hazard[kind] = (recent_used[kind] + _PRIOR_CHUNKS * expected) / (recent_at_risk[kind] + _PRIOR_CHUNKS)
        worth: list[list[float]] = _best_density(np.clip(hazard, 0.0, 1.0)).tolist()
        return worth


def _at_risk(used: _Table, ended: _Table) -> _Table:
    """[…][bucket]: chunks that reached this age; those not used again in their last bucket count half for it."""
    reached = np.flip(np.cumsum(np.flip(ended, axis=-1), axis=-1), axis=-1)
    return reached - 0.5 * (ended - used)


def _best_density(hazard: _Table) -> _Table:
    """[kind][bucket] hazards → [kind][bucket] uses per second, at the best horizon from each bucket on."""
    bounds_s = np.array([0, *_BOUNDS_NS, 2 * _BOUNDS_NS[-1]]) / 1e9
    unused = np.cumprod(1.0 - hazard, axis=1)
    before = np.concatenate([np.ones((len(hazard), 1)), unused[:, :-1]], axis=1)
    uses = np.cumsum(before * hazard, axis=1)
    seconds = np.cumsum(before * np.diff(bounds_s) * (1.0 - hazard / 2), axis=1)
    density = np.empty_like(hazard)
    for bucket in range(hazard.shape[1]):
        past_uses = uses[:, bucket - 1 : bucket] if bucket else 0.0
        past_seconds = seconds[:, bucket - 1 : bucket] if bucket else 0.0
        gained = uses[:, bucket:] - past_uses
        spent = seconds[:, bucket:] - past_seconds
        density[:, bucket] = np.max(gained / np.maximum(spent, 1e-12), axis=1)
    return density
