"""What each tenant holds in a pool and what it got of it, by model; the small ones together, as `other`."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from halfmoon.kv_tier.quotas import Held, TierBook
from halfmoon.schemas.chunks import ChunkMeta, Tier
from halfmoon.schemas.ids import ModelName, TenantId
from halfmoon.schemas.kv_tier import NOBODY, Acquire, AcquiredChunk
from halfmoon.schemas.pool_stats import TenantUse
from halfmoon.tracing.tenants import OTHER, TenantCollector, TenantCounts, biggest

_HIT, _MISS, _EVICTED, _REFUSED = "hit", "miss", "evicted", "refused"
_HIT_TOKENS, _MISS_TOKENS = "hit tokens", "miss tokens"


class Accounts:
    """Of one node. `books` are those of its tiers; more are added as tiers are opened."""

    def __init__(self, *books: TierBook) -> None:
        self.books = list(books)
        self._counts = TenantCounts()

    def asked(self, request: Acquire, chunks: Sequence[AcquiredChunk]) -> None:
        """These chunks were asked for on a tenant's behalf, and this is what became of them."""
        if request.tenant == NOBODY:
            return
        amounts = {_HIT: 0, _MISS: 0, _HIT_TOKENS: 0, _MISS_TOKENS: 0}
        for wanted, chunk in zip(request.chunks, chunks, strict=True):
            is_miss = chunk.slot is None
            amounts[_MISS if is_miss else _HIT] += 1
            amounts[_MISS_TOKENS if is_miss else _HIT_TOKENS] += wanted.num_tokens
        self._counts.add(request.tenant, request.model, amounts)

    def evicted(self, meta: ChunkMeta) -> None:
        """A chunk is gone from the node."""
        self._counts.add(meta.tenant, meta.model, {_EVICTED: 1})

    def refused(self, meta: ChunkMeta) -> None:
        """A new chunk wasn't kept: its tenant has its quota, and all of it in use."""
        self._counts.add(meta.tenant, meta.model, {_REFUSED: 1})

    def held(self) -> dict[tuple[TenantId, ModelName, Tier], Held]:
        """By tenant (the biggest holders, and `other`), model and tier. May be called from another thread."""
        holdings = [(book.tier, *each) for book in self.books for each in book.held()]
        named = biggest([(tenant, held.num_bytes) for _, tenant, _, held in holdings])
        sums: defaultdict[tuple[TenantId, ModelName, Tier], Held] = defaultdict(Held)
        for tier, tenant, model, held in holdings:
            total = sums[tenant if tenant in named else TenantId(OTHER), model, tier]
            total.num_chunks += held.num_chunks
            total.num_bytes += held.num_bytes
        return dict(sums)

    def rows(self) -> tuple[TenantUse, ...]:
        """For the answer to `Stats`."""
        held, sums = self.held(), self._counts.sums()
        names = {(tenant, model) for tenant, model, _ in held}
        names |= {(TenantId(tenant), ModelName(model)) for tenant, model, _ in sums}
        tiers = {
            (tenant, model): {tier: here for tier in Tier if (here := held.get((tenant, model, tier))) is not None}
            for tenant, model in names
        }
        rows = [
            TenantUse(
                tenant=tenant,
                model=model,
                num_chunks={tier.value: here.num_chunks for tier, here in tiers[tenant, model].items()},
                num_bytes={tier.value: here.num_bytes for tier, here in tiers[tenant, model].items()},
                hits=sums.get((tenant, model, _HIT), 0),
                misses=sums.get((tenant, model, _MISS), 0),
                evictions=sums.get((tenant, model, _EVICTED), 0),
                refused=sums.get((tenant, model, _REFUSED), 0),
                hit_tokens=sums.get((tenant, model, _HIT_TOKENS), 0),
            )
            for tenant, model in names
        ]
        return tuple(sorted(rows, key=lambda row: (-sum(row.num_bytes.values()), row.tenant, row.model)))

    def collectors(self) -> Iterable[Collector]:
        """What Prometheus sees of it: `halfmoon_kvtier_tenant_…`."""
        yield HeldCollector(self)
        yield TenantCollector(
            "kvtier_tenant_chunks",
            "Chunks asked for, evicted, and not kept because of a quota, by tenant and model.",
            self._counts,
            {kind: kind for kind in (_HIT, _MISS, _EVICTED, _REFUSED)},
        )
        yield TenantCollector(
            "kvtier_tenant_tokens",
            "Tokens of the chunks asked for, by tenant and model.",
            self._counts,
            {_HIT_TOKENS: _HIT, _MISS_TOKENS: _MISS},
        )


class HeldCollector(Collector):
    """Exports what tenants hold. Called from the metrics server's thread; reads only."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts

    def collect(self) -> Iterable[Metric]:
        labels = ["tenant", "model", "tier"]
        num_bytes = GaugeMetricFamily("halfmoon_kvtier_tenant_held_bytes", "Space that chunks take.", labels=labels)
        num_chunks = GaugeMetricFamily("halfmoon_kvtier_tenant_held_chunks", "Registered chunks.", labels=labels)
        for (tenant, model, tier), held in self._accounts.held().items():
            num_bytes.add_metric([tenant, model, tier], held.num_bytes)
            num_chunks.add_metric([tenant, model, tier], held.num_chunks)
        return [num_bytes, num_chunks]
