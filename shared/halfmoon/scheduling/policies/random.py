"""Any worker, whatever it holds and however busy it is: the `random` of Mooncake's comparisons (arXiv 2407.00079v3,
figure 8; FAST'25, figure 5).

Drawn by the request's id, so the same request and workers give the same draw, in every conductor and every simulation.
"""

from collections.abc import Iterable

from halfmoon.scheduling.cluster import WorkerLoad
from halfmoon.scheduling.contract import Ask, Candidates, Costs, DecodeChoice, Plan
from halfmoon.scheduling.policies.ranking import least, local_prefills, lot


class Random:
    """Reuses what the chosen node happens to hold, and pulls nothing."""

    def rank(self, ask: Ask, candidates: Candidates, costs: Costs, turn: int) -> Plan:
        def drawn(workers: Iterable[WorkerLoad]) -> list[WorkerLoad]:
            return least(workers, lambda worker: (lot(ask, worker),), costs.num_choices)

        prefills = local_prefills(ask, drawn(candidates.prefills), candidates.card, costs)
        decodes = tuple(
            DecodeChoice(worker=worker, num_hot=ask.num_hot(worker.worker)) for worker in drawn(candidates.decodes)
        )
        return Plan(candidates.card, prefills, decodes, "drawn by lot")
