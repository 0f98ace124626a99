"""What Prometheus sees of a pool's SSD tier: `halfmoon_kvtier_ssd_…`, read at each scrape."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from halfmoon.schemas.pool_stats import SsdStats

_PREFIX = "halfmoon_kvtier_ssd"


class SsdCollector(Collector):
    """Called from the metrics server's thread; reads only."""

    def __init__(self, stats: Callable[[], SsdStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        removed = CounterMetricFamily(
            f"{_PREFIX}_removed_files", "Files that could not be served, by reason.", labels=["reason"]
        )
        for reason, count in stats.removed.items():
            removed.add_metric([reason], count)
        return [
            removed,
            GaugeMetricFamily(f"{_PREFIX}_chunks", "Chunks on the SSD.", stats.num_chunks),
            GaugeMetricFamily(f"{_PREFIX}_bytes", "Bytes of their files.", stats.num_bytes),
            GaugeMetricFamily(f"{_PREFIX}_max_bytes", "Bytes that files may take.", stats.max_bytes),
            GaugeMetricFamily(f"{_PREFIX}_failing", "1 while the disk is left alone.", bool(stats.failure)),
            GaugeMetricFamily(
                f"{_PREFIX}_high_watermark", "Share of DRAM above which demotion begins.", stats.high_watermark
            ),
            GaugeMetricFamily(
                f"{_PREFIX}_low_watermark", "Share of DRAM in use at which it ends.", stats.low_watermark
            ),
            GaugeMetricFamily(
                f"{_PREFIX}_promote_within", "Chunks between two uses that promote.", stats.promote_within
            ),
            CounterMetricFamily(f"{_PREFIX}_hits", "Chunks asked for that were read from the SSD.", stats.hits),
            CounterMetricFamily(f"{_PREFIX}_reads", "Files read.", stats.reads),
            CounterMetricFamily(f"{_PREFIX}_writes", "Files written.", stats.writes),
            CounterMetricFamily(f"{_PREFIX}_demotions", "Chunks that moved from DRAM to the SSD.", stats.demotions),
            CounterMetricFamily(f"{_PREFIX}_promotions", "Chunks that are kept in DRAM again.", stats.promotions),
            CounterMetricFamily(f"{_PREFIX}_refused", "Chunks not worth a write.", stats.refused),
            CounterMetricFamily(f"{_PREFIX}_evictions", "Chunks evicted from the SSD.", stats.evictions),
            CounterMetricFamily(f"{_PREFIX}_errors", "Reads and writes that failed.", stats.errors),
        ]
