"""Models of one kind for every worker: its own where it has shown something, else that of its like. Pure.

A decision asks for all workers at once, and their models change seldom: so the coefficients of the workers that were
asked for last are kept as columns, until any of them changes.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from halfmoon.scheduling.cluster import Roster, WorkerLoad, Workers
from halfmoon.scheduling.costs.ladder import Ladder
from halfmoon.scheduling.costs.regression import Regression
from halfmoon.schemas.ids import WorkerId

Key = tuple[str, ...]
Coefficients = npt.NDArray[np.float64]
"""One row for each coefficient, one column for each worker."""


class WorkerModels:
    def __init__(self, first: Callable[[Key], Regression]) -> None:
        self.ladder: Ladder[Key] = Ladder(first)
        self._of: dict[WorkerId, Regression | None] = {}
        """As found last, until a model comes or goes."""
        self._columns: tuple[Roster, int, Coefficients | None] | None = None
        """Of whom, after how many changes, and what they were."""

    def observe(self, worker: WorkerId, like: Key, features: tuple[float, ...], seconds: float) -> None:
        if self.ladder.observe(((worker,), like), features, seconds):
            self._of.clear()

    def forget(self, worker: WorkerId) -> None:
        self.ladder.forget((worker,))
        self._of.pop(worker, None)

    def of(self, worker: WorkerLoad) -> tuple[float, ...] | None:
        """Its coefficients; None where neither it nor any of its like has shown anything."""
        try:
            model = self._of[worker.worker]
        except KeyError:
            like = (worker.card.name, worker.card.fingerprint, worker.role.value)
            model = self._of[worker.worker] = self.ladder.find((worker.worker,), like)
        return None if model is None else model.coefficients

    def columns(self, workers: Workers) -> Coefficients | None:
        """Those of these workers, in their order; None where one of them has no model."""
        num_changes = self.ladder.num_changes
        if self._columns is None or self._columns[0] is not workers.roster or self._columns[1] != num_changes:
            known = [model for worker in workers if (model := self.of(worker)) is not None]
            columns = np.array(known).T.copy() if len(known) == len(workers) > 0 else None
            self._columns = (workers.roster, num_changes, columns)
        return self._columns[2]
