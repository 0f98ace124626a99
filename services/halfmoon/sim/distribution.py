"""Percentiles in bounded memory: exact while values are few, within half a percent when they are many."""

import math
from collections import Counter

import numpy as np

_MAX_EXACT = 200_000
_LOG_RATIO = math.log(1.01)
"""Bins a percent wide: a value is off by half of it at most (Masson, Rim and Lee, DDSketch, VLDB 2019)."""


class Distribution:
    """Values ≥ 0 with weights."""

    def __init__(self, max_exact: int = _MAX_EXACT) -> None:
        self._max_exact = max_exact
        self._values: list[float] = []
        self._weights: list[float] = []
        self._bins: Counter[int] = Counter()
        self._num_zero = 0.0
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        self._sum += value * weight
        self._weight += weight
        self._values.append(value)
        self._weights.append(weight)
        if len(self._values) > self._max_exact:
            self._fold()

    @property
    def weight(self) -> float:
        """Of all values."""
        return self._weight

    @property
    def mean(self) -> float | None:
        return self._sum / self._weight if self._weight else None

    def quantile(self, share: float) -> float | None:
        """The least value that at least this share of the weight doesn't exceed. None where there is no value."""
        if not self._weight:
            return None
        if self._bins or self._num_zero:
            self._fold()
            return self._folded(share)
        values, weights = np.asarray(self._values), np.asarray(self._weights)
        order = np.argsort(values, kind="stable")
        reached = np.cumsum(weights[order])
        at = int(np.searchsorted(reached, share * reached[-1] * (1 - 1e-12)))
        return float(values[order][min(at, len(values) - 1)])

    def summary(self) -> dict[str, float | None]:
        found = {"mean": self.mean} | {f"p{share}": self.quantile(share / 100) for share in (50, 90, 99)}
        return {name: None if value is None else round(value, 6) for name, value in found.items()}

    def _fold(self) -> None:
        for value, weight in zip(self._values, self._weights, strict=True):
            if value > 0:
                self._bins[math.ceil(math.log(value) / _LOG_RATIO)] += weight  # type: ignore[assignment]
            else:
                self._num_zero += weight
        self._values, self._weights = [], []

    def _folded(self, share: float) -> float:
        left = share * self._weight * (1 - 1e-12) - self._num_zero
        if left <= 0:
            return 0.0
        number = 0
        for number in sorted(self._bins):
            left -= self._bins[number]
            if left <= 0:
                break
        return math.exp((number - 0.5) * _LOG_RATIO)
