"""What Prometheus sees of a pool: read at each scrape, from the same figures as heartbeats."""

import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from halfmoon.kv_tier.copies import Copier
from halfmoon.kv_tier.store import ChunkStore
from halfmoon.schemas.copies import Cause
from halfmoon.schemas.ids import NodeId
from halfmoon.schemas.pool_stats import PoolStats
from halfmoon.transport.health import PathHealth


class PoolCollector(Collector):
    """Exports a pool's stats as `halfmoon_kvtier_…`. Called from the metrics server's thread; reads only."""

    def __init__(
        self,
        stats: Callable[[], PoolStats],
        transfers: Callable[[], int],
        loans: Callable[[], int],
        events: Callable[[], int],
    ) -> None:
        """`transfers`: chunks on their way here; `loans`: leases held elsewhere for readers here; `events`: chunks
        whose news isn't published yet."""
        self._stats = stats
        self._transfers = transfers
        self._loans = loans
        self._events = events

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        slots = GaugeMetricFamily("halfmoon_kvtier_slots", "Slots of the arena, by state.", labels=["state"])
        for state, count in (
            ("free", stats.free),
            ("staged", stats.staged),
            ("ready", stats.ready),
            ("leased", stats.leased),
            ("pinned", stats.pinned),
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
            GaugeMetricFamily(
                "halfmoon_kvtier_pins_refused", "Chunks to be pinned, beyond what may be.", stats.pins_refused
            ),
            GaugeMetricFamily("halfmoon_kvtier_chunks", "Registered chunks.", stats.num_chunks),
            GaugeMetricFamily("halfmoon_kvtier_transfers", "Chunks on their way here.", self._transfers()),
            GaugeMetricFamily("halfmoon_kvtier_loans", "Leases held at other nodes for readers here.", self._loans()),
            GaugeMetricFamily("halfmoon_kvtier_events_pending", "Chunks with unpublished news.", self._events()),
            CounterMetricFamily("halfmoon_kvtier_evictions", "Chunks evicted.", stats.evictions),
            CounterMetricFamily("halfmoon_kvtier_pulled_bytes", "Bytes pulled from other nodes.", stats.bytes_pulled),
            CounterMetricFamily(
                "halfmoon_kvtier_in_place_bytes", "Bytes read at other nodes without a copy.", stats.bytes_in_place
            ),
            CounterMetricFamily("halfmoon_kvtier_served_bytes", "Bytes sent to others over tcp.", stats.bytes_served),
        ]


class CopiesCollector(Collector):
    """Exports what became of chunks that came without a request, and of those that others held too."""

    def __init__(self, store: ChunkStore, copier: Copier) -> None:
        self._store = store
        self._copier = copier

    def collect(self) -> Iterable[Metric]:
        unasked, copier = self._store.unasked, self._copier
        prefix = "halfmoon_kvtier_copied_chunks"
        copied = CounterMetricFamily(prefix, "Chunks that came without a request, by cause.", labels=["cause"])
        fates = CounterMetricFamily(
            f"{prefix}_ended",
            "Of these, used by a request before they went (hit), or gone unused (waste).",
            labels=["cause", "fate"],
        )
        waiting = GaugeMetricFamily(f"{prefix}_waiting", "Of these, here and not used yet.", labels=["cause"])
        for cause in Cause:
            copied.add_metric([cause.value], unasked.brought[cause])
            fates.add_metric([cause.value, "hit"], unasked.hits[cause])
            fates.add_metric([cause.value, "waste"], unasked.waste[cause])
            waiting.add_metric([cause.value], unasked.num_waiting(cause))
        left_out = CounterMetricFamily(
            "halfmoon_kvtier_copies_left_out", "Copies that were ordered and not made, by reason.", labels=["reason"]
        )
        left_out.add_metric(["given_up"], copier.num_given_up)
        left_out.add_metric(["failed"], copier.num_failed)
        return [
            copied,
            fates,
            waiting,
            left_out,
            GaugeMetricFamily("halfmoon_kvtier_copies_queued", "Copies in line to be made.", copier.num_queued),
            GaugeMetricFamily(
                "halfmoon_kvtier_surplus_chunks",
                "Chunks that go first, since enough other nodes hold them.",
                self._store.evictor.num_surplus,
            ),
            CounterMetricFamily("halfmoon_kvtier_trimmed", "Evictions of such chunks.", self._store.counters.trimmed),
        ]


class PathCollector(Collector):
    """Exports what is known of the paths to other nodes, as `halfmoon_kvtier_path_…{peer, transport}`."""

    def __init__(self, paths: Callable[[], Mapping[tuple[NodeId, str], PathHealth]]) -> None:
        self._paths = paths

    def collect(self) -> Iterable[Metric]:
        labels = ["peer", "transport"]
        prefix = "halfmoon_kvtier_path"
        num_bytes = CounterMetricFamily(f"{prefix}_bytes", "Bytes read.", labels=labels)
        busy_s = CounterMetricFamily(f"{prefix}_seconds", "Time that reads took, added up.", labels=labels)
        failures = CounterMetricFamily(f"{prefix}_failures", "Reads that failed or ran out of time.", labels=labels)
        set_asides = CounterMetricFamily(f"{prefix}_set_asides", "Times it was set aside.", labels=labels)
        is_aside = GaugeMetricFamily(f"{prefix}_set_aside", "1 while it is set aside.", labels=labels)
        speed = GaugeMetricFamily(f"{prefix}_gb_per_s", "Measured bandwidth, a running estimate.", labels=labels)
        now_ns = time.time_ns()
        for (peer, transport), path in list(self._paths().items()):
            at = [str(peer), transport]
            num_bytes.add_metric(at, path.num_bytes)
            busy_s.add_metric(at, path.busy_s)
            failures.add_metric(at, path.num_failures)
            set_asides.add_metric(at, path.num_set_asides)
            is_aside.add_metric(at, path.failures_in_a_row > 0 and path.set_aside_until_ns > now_ns)
            if path.gb_per_s is not None:
                speed.add_metric(at, path.gb_per_s)
        return [num_bytes, busy_s, failures, set_asides, is_aside, speed]
