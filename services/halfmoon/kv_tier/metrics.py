"""What Prometheus sees of a pool: read at each scrape, from the same figures as heartbeats."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from halfmoon.schemas.kv_tier import PoolStats


class PoolCollector(Collector):
    """Exports a pool's stats as `halfmoon_kvtier_…`. Called from the metrics server's thread; reads only."""

    def __init__(self, stats: Callable[[], PoolStats], transfers: Callable[[], int], events: Callable[[], int]) -> None:
        """`transfers`: chunks on their way here; `events`: chunks whose news isn't published yet."""
        self._stats = stats
        self._transfers = transfers
        self._events = events

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        slots = GaugeMetricFamily("halfmoon_kvtier_slots", "Slots of the arena, by state.", labels=["state"])
        for state, count in (
            ("free", stats.free),
            ("staged", stats.staged),
            ("ready", stats.ready),
            ("leased", stats.leased),
        ):
            slots.add_metric([state], count)
        acquired = CounterMetricFamily("halfmoon_kvtier_acquired_chunks", "Chunks asked for.", labels=["outcome"])
        for outcome, count in (
            ("hit_local", stats.hits_local),
            ("hit_remote", stats.hits_remote),
            ("miss", stats.misses),
        ):
            acquired.add_metric([outcome], count)
        return [
            slots,
            acquired,
            GaugeMetricFamily("halfmoon_kvtier_leases", "Open leases.", stats.num_leases),
            GaugeMetricFamily("halfmoon_kvtier_chunks", "Registered chunks.", stats.num_chunks),
            GaugeMetricFamily("halfmoon_kvtier_transfers", "Chunks on their way here.", self._transfers()),
            GaugeMetricFamily("halfmoon_kvtier_events_pending", "Chunks with unpublished news.", self._events()),
            CounterMetricFamily("halfmoon_kvtier_evictions", "Chunks evicted.", stats.evictions),
            CounterMetricFamily("halfmoon_kvtier_pulled_bytes", "Bytes pulled from other nodes.", stats.bytes_pulled),
            CounterMetricFamily("halfmoon_kvtier_served_bytes", "Bytes sent to others over tcp.", stats.bytes_served),
        ]
