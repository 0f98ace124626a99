"""The baseline: workers take turns, whatever they hold and however busy they are."""

from collections.abc import Sequence

from halfmoon.scheduling.cluster import WorkerLoad
from halfmoon.scheduling.contract import Ask, Candidates, Costs, DecodeChoice, Plan
from halfmoon.scheduling.policies.ranking import local_prefills


class RoundRobin:
    """Reuses what the chosen node happens to hold, and pulls nothing."""

    def rank(self, ask: Ask, candidates: Candidates, costs: Costs, turn: int) -> Plan:
        prefills = local_prefills(ask, _from(candidates.prefills, turn), candidates.card, costs)
        decodes = tuple(
            DecodeChoice(worker=worker, num_hot=ask.num_hot(worker.worker))
            for worker in _from(candidates.decodes, turn)[: costs.num_choices]
        )
        return Plan(candidates.card, prefills, decodes, f"turn {turn}")


def _from(workers: Sequence[WorkerLoad], turn: int) -> list[WorkerLoad]:
    ordered = sorted(workers, key=lambda worker: worker.worker)
    first = turn % len(ordered) if ordered else 0
    return ordered[first:] + ordered[:first]
