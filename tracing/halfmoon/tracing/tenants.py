"""Counts by tenant and model, under a bounded number of names: the biggest tenants', and `other` for the rest."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

OTHER: Final = "other"
MAX_NAMED: Final = 32
"""Tenants with a label of their own, per process."""

_CANDIDATES_PER_NAME = 8


class TenantCounts:
    """Sums that only rise, with at most `max_named` tenants told apart.

    Who comes while names are left gets one. Later a tenant gets the name of the smallest when it has become twice as
    big; the sums of that one go over to `other`, where those of the newcomer stay that it had until then. So the total
    is always exact, and no sum falls. Of the others, a few more than there are names are followed, as in lossy counting
    (Manku and Motwani, VLDB '02).
    """

    def __init__(self, max_named: int = MAX_NAMED) -> None:
        self._max_named = max_named
        self._named: Counter[str] = Counter()
        """Weight of each tenant that has a name."""
        self._candidates: Counter[str] = Counter()
        self._sums: Counter[tuple[str, str, str]] = Counter()

    def add(self, tenant: str, model: str, amounts: Mapping[str, int]) -> None:
        """`amounts` by kind. What they add up to is what makes a tenant big."""
        weight = sum(amounts.values())
        name = self._name(tenant, weight)
        for kind, amount in amounts.items():
            self._sums[name, model, kind] += amount

    def sums(self) -> dict[tuple[str, str, str], int]:
        """By tenant or `other`, model and kind. May be called from another thread."""
        return dict(self._sums)

    def _name(self, tenant: str, weight: int) -> str:
        if tenant in self._named or len(self._named) < self._max_named:
            self._named[tenant] += weight
            return tenant
        self._candidates[tenant] += weight
        smallest = min(self._named, key=self._named.__getitem__)
        if self._candidates[tenant] > 2 * self._named[smallest]:
            self._fold(smallest)
            self._candidates[smallest] = self._named.pop(smallest)
            self._named[tenant] = self._candidates.pop(tenant)
            return tenant
        if len(self._candidates) > _CANDIDATES_PER_NAME * self._max_named:
            self._candidates = Counter({each: count // 2 for each, count in self._candidates.items() if count > 1})
        return OTHER

    def _fold(self, tenant: str) -> None:
        for key in [key for key in self._sums if key[0] == tenant]:
            self._sums[OTHER, key[1], key[2]] += self._sums.pop(key)


class TenantCollector(Collector):
    """Exports `TenantCounts` as a counter `halfmoon_<thing>_total{tenant, model, kind}`."""

    def __init__(self, thing: str, help_text: str, counts: TenantCounts, kinds: Mapping[str, str]) -> None:
        """`kinds`: which of the sums, and the label of each."""
        self._name = f"halfmoon_{thing}"
        self._help = help_text
        self._counts = counts
        self._kinds = kinds

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._help, labels=["tenant", "model", "kind"])
        for (tenant, model, kind), amount in self._counts.sums().items():
            if kind in self._kinds:
                family.add_metric([tenant, model, self._kinds[kind]], amount)
        return [family]


def biggest(sizes: Sequence[tuple[str, int]], max_named: int = MAX_NAMED) -> frozenset[str]:
    """The tenants with the largest sums of these sizes, which get names in a gauge."""
    totals: Counter[str] = Counter()
    for tenant, size in sizes:
        totals[tenant] += size
    return frozenset(tenant for tenant, _ in totals.most_common(max_named))
