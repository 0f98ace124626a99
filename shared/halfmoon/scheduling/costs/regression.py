"""A line through what was measured: seconds = coefficients · features, none of them negative. Pure.

Weighted least squares on relative residuals, with exponential forgetting (Ljung, *System Identification*, §11.2), kept
as normal equations rather than as their inverse, so that the solution can be held non-negative (three coefficients at
most: every set of them that may be zero is tried, which is exact). Three things on top:

- **relative**: a miss of 10 % counts the same for a prompt of 5 ms and of 5 s, and twice as long as half as long;
- **robust**: what is further off than is usual here (Huber's k = 1.345 times the running median) pulls with a constant
  force, however far off it is: a paused process says nothing about a prompt's length;
- **a prior** that weighs little, and is never forgotten: what measurements can't tell apart keeps sane coefficients.
"""

import itertools
import math
from collections.abc import Sequence

HUBER_K = 1.345
FORGETTING = 0.99
"""Per sample: those a hundred back count a third."""
ERROR_WEIGHT = 0.1
"""Of the newest in the running error."""
MAX_ERROR = 10.0
FLOOR_S = 1e-6
"""Nothing is taken to be shorter: residuals are relative."""
_SCALE_STEP = 0.1
_EACH, _EVERY = 16, 8
"""The first few samples change much, each; later ones little, and solving costs more than noting them."""
_MIN_SCALE = 0.02
_SINGULAR = 1e-9


class Regression:
    """One fitted model."""

    def __init__(self, prior: Sequence[float], spread: Sequence[float], *, prior_weight: float = 1e-3) -> None:
        """`prior`: coefficients before there is data; `spread`: how far each may well be off, above 0;
        `prior_weight`: in samples."""
        self.spread = tuple(spread)
        self._prior_weights = [prior_weight / (each * each) for each in spread]
        self._prior = tuple(prior)
        size = len(prior)
        self._a = [[0.0] * size for _ in range(size)]
        self._b = [0.0] * size
        self._scale = 1.0
        """Running median of the residuals, as logarithms of measured over predicted."""
        self.coefficients = self._prior
        self.num_samples = 0
        self.error = 0.0
        """Running mean of |predicted - measured| / measured, of each sample before it was learned from."""

    def predict(self, features: Sequence[float]) -> float:
        return sum([each * feature for each, feature in zip(self.coefficients, features, strict=True)])

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Learn from one measurement. What isn't a finite time is ignored."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        predicted, seconds = max(self.predict(features), FLOOR_S), max(seconds, FLOOR_S)
        residual = abs(math.log(seconds / predicted))
        error = min(abs(seconds - predicted) / seconds, MAX_ERROR)
        self.error = error if not self.num_samples else self.error + ERROR_WEIGHT * (error - self.error)
        bound = HUBER_K * self._scale
        weight = (1.0 if residual <= bound else bound / residual) / (max(predicted, seconds) * seconds)
        grows = 1 + _SCALE_STEP if residual > self._scale else 1 - _SCALE_STEP
        self._scale = max(_MIN_SCALE, self._scale * grows)
        for i, one in enumerate(features):
            row = self._a[i]
            for j, other in enumerate(features):
                row[j] = FORGETTING * row[j] + weight * one * other
            self._b[i] = FORGETTING * self._b[i] + weight * one * seconds
        self.num_samples += 1
        if self.num_samples <= _EACH or self.num_samples % _EVERY == 0:
            self.coefficients = self._solve()

    def _solve(self) -> tuple[float, ...]:
        size = len(self._prior)
        a = [[self._a[i][j] + (self._prior_weights[i] if i == j else 0.0) for j in range(size)] for i in range(size)]
        b = [self._b[i] + self._prior_weights[i] * self._prior[i] for i in range(size)]
        unbound = _linear(a, b)
        if unbound is not None and min(unbound) >= 0:
            return tuple(unbound)  # nothing is less: the objective is convex
        best, least = (0.0,) * size, 0.0
        for count in range(1, size):
            for chosen in itertools.combinations(range(size), count):
                part = _linear([[a[i][j] for j in chosen] for i in chosen], [b[i] for i in chosen])
                if part is None or min(part) < 0:
                    continue
                # At the minimum over these, the objective xᵀax - 2bᵀx is -bᵀx.
                value = -sum(b[i] * x for i, x in zip(chosen, part, strict=True))
                if value < least:
                    least = value
                    found = dict(zip(chosen, part, strict=True))
                    best = tuple(found.get(i, 0.0) for i in range(size))
        return best


def _linear(a: list[list[float]], b: list[float]) -> list[float] | None:
    """Solve a·x = b for a positive definite `a`, scaled so that features of any size are as good. None where the
    measurements can't tell these features apart."""
    scale = [1 / math.sqrt(a[i][i]) for i in range(len(b))]
    rows = [[a[i][j] * scale[i] * scale[j] for j in range(len(b))] + [b[i] * scale[i]] for i in range(len(b))]
    for i, row in enumerate(rows):
        if row[i] < _SINGULAR:
            return None
        for below in rows[i + 1 :]:
            factor = below[i] / row[i]
            for j in range(i, len(row)):
                below[j] -= factor * row[j]
    x = [0.0] * len(b)
    for i in reversed(range(len(b))):
        x[i] = (rows[i][-1] - sum(rows[i][j] * x[j] for j in range(i + 1, len(b)))) / rows[i][i]
    return [value * each for value, each in zip(x, scale, strict=True)]
