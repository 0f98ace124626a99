"""Models of one kind, from the particular to the general: what one worker or pair has not shown yet, its like have."""

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from halfmoon.scheduling.costs.regression import Regression

K = TypeVar("K", bound=Hashable)

MAX_MODELS = 20_000
OWN_SPREAD = 0.5
"""How far one may well be off its like, as a share."""
LIKE_WEIGHT = 0.05
"""In samples: so much is its like believed against what it shows itself."""


class Ladder(Generic[K]):
    """Each sample teaches all rungs that its keys name; the first known rung answers."""

    def __init__(self, first: Callable[[K], Regression]) -> None:
        """`first`: the model of the most general rung, before there is data."""
        self._first = first
        self._models: dict[K, Regression] = {}
        self.num_changes = 0
        """How often a model came, went, or got other coefficients: until it grows, all answers stay the same."""

    def observe(self, keys: Sequence[K], features: Sequence[float], seconds: float) -> bool:
        """`keys`: from the most particular to the most general. Returns whether that made a model: what `find` says
        may be another one from then on."""
        is_new = False
        above: Regression | None = None
        for key in reversed(keys):
            model = self._models.get(key)
            if model is None:
                model = self._first(key) if above is None else _like(above)
                if len(self._models) >= MAX_MODELS:
                    del self._models[next(iter(self._models))]
                self._models[key] = model
                is_new = True
            before = model.coefficients
            model.observe(features, seconds)
            self.num_changes += is_new or model.coefficients is not before
            above = model
        return is_new

    def find(self, *keys: K) -> Regression | None:
        return next((model for key in keys if (model := self._models.get(key)) is not None), None)

    def forget(self, key: K) -> None:
        self._models.pop(key, None)
        self.num_changes += 1

    def items(self) -> list[tuple[K, Regression]]:
        return list(self._models.items())


def _like(general: Regression) -> Regression:
    """A model of its own that begins where the general one stands."""
    coefficients = general.coefficients
    # A coefficient that is 0 there may be any here.
    spread = [OWN_SPREAD * each or first for each, first in zip(coefficients, general.spread, strict=True)]
    return Regression(coefficients, spread, prior_weight=LIKE_WEIGHT)
