"""The least busy workers, whatever they hold: the `load balance` of Mooncake's comparisons (arXiv 2407.00079v3,
figure 8; FAST'25, figure 5).

Prefill: the shortest queue, in estimated seconds. Decode: the smallest share of its batch in use, then of its KV.
"""

from halfmoon.scheduling.cluster import WorkerLoad
from halfmoon.scheduling.contract import Ask, Candidates, Costs, DecodeChoice, Plan
from halfmoon.scheduling.policies.ranking import least, local_prefills, lot


class LeastLoaded:
    """Reuses what the chosen node happens to hold, and pulls nothing."""

    def rank(self, ask: Ask, candidates: Candidates, costs: Costs, turn: int) -> Plan:
        estimates = costs.estimates

        def queue(worker: WorkerLoad) -> tuple[float, ...]:
            return (estimates.queue_s(worker), worker.occupancy, lot(ask, worker))

        def batch(worker: WorkerLoad) -> tuple[float, ...]:
            return (worker.occupancy, worker.used, lot(ask, worker))

        idlest = least(candidates.prefills, queue, costs.num_choices)
        prefills = local_prefills(ask, idlest, candidates.card, costs)
        decodes = tuple(
            DecodeChoice(worker=worker, num_hot=ask.num_hot(worker.worker))
            for worker in least(candidates.decodes, batch, costs.num_choices)
        )
        reason = f"{idlest[0].queued_tokens} tokens queued ahead" if prefills else "nothing to prefill"
        return Plan(candidates.card, prefills, decodes, reason)
