"""Requests go to the cache as far as that is quicker than computing elsewhere, and the cache never moves: Mooncake's
`cache-aware` (arXiv 2407.00079v3, figure 8 and §6.1) or `local` (FAST'25, figure 5) scheduling.

For each prefill worker, the estimated time until the prompt's KV is there:

    its queue  +  computing what neither its engine nor its node holds

So a long match wins only until its worker's queue costs more than the match saves. Where every prompt begins alike,
load still spreads. Decode goes where the request would end first; see `decoding`.
"""

from halfmoon.scheduling.cluster import WorkerLoad
from halfmoon.scheduling.contract import Ask, Candidates, Costs, Plan, PrefillChoice
from halfmoon.scheduling.policies.decoding import Decoding
from halfmoon.scheduling.policies.ranking import best, described, local_prefill, lot


class PrefixAffinity:
    def rank(self, ask: Ask, candidates: Candidates, costs: Costs, turn: int) -> Plan:
        card, estimates = candidates.card, costs.estimates

        def here(worker: WorkerLoad) -> PrefillChoice:
            return local_prefill(ask, worker, card, costs)

        def key(choice: PrefillChoice) -> tuple[float, ...]:
            return (choice.cost_s, choice.worker.occupancy, lot(ask, choice.worker))

        prefills: tuple[PrefillChoice, ...] = ()
        if ask.has_chunks:
            workers = candidates.prefills
            bounds = estimates.queues_s(workers)
            prefills = tuple(best(bounds, lambda place: here(workers[place]), key, costs.num_choices))
        decoding = Decoding(ask, card, costs, prefills[0] if prefills else None, here)
        decodes = decoding.rank(candidates.decodes)
        return Plan(card, prefills, decodes, described(ask, prefills, decodes[0]))
