"""Workers that nobody can work with: no worker of the other role has the same KV. Pure."""

from collections.abc import Iterable

from halfmoon.scheduling.cluster import WorkerLoad
from halfmoon.schemas.ids import WorkerId
from halfmoon.schemas.splits import Role

ALONE_AFTER_S = 5.0
"""So long may the other half of a system take to come up before it is missed."""

_COMPLEMENTS = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


def without_partner(workers: Iterable[WorkerLoad]) -> dict[WorkerId, WorkerLoad]:
    """Those whose model nobody of the other role serves with the same KV. Colocated workers need no partner."""
    there = list(workers)
    kinds = {(worker.role, worker.card.name, worker.card.kv_identity) for worker in there}
    return {
        worker.worker: worker
        for worker in there
        if worker.role in _COMPLEMENTS
        and (_COMPLEMENTS[worker.role], worker.card.name, worker.card.kv_identity) not in kinds
    }


class Lonely:
    """Who has been without a partner for long enough to say so, once each time."""

    def __init__(self, alone_after_s: float = ALONE_AFTER_S) -> None:
        self._alone_after_s = alone_after_s
        self._since_s: dict[WorkerId, float] = {}
        self._told: set[WorkerId] = set()

    def look(self, workers: Iterable[WorkerLoad], now_s: float) -> tuple[int, list[WorkerLoad]]:
        """How many are without a partner; and those to be told of now."""
        alone = without_partner(workers)
        self._since_s = {worker: self._since_s.get(worker, now_s) for worker in alone}
        self._told &= alone.keys()
        news = [
            alone[worker]
            for worker, since_s in self._since_s.items()
            if worker not in self._told and now_s - since_s >= self._alone_after_s
        ]
        self._told.update(load.worker for load in news)
        return len(alone), news
