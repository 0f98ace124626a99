"""What the prefill service counts."""

from halfmoon.schemas.chunks import ChunkOutcome
from halfmoon.tracing.metrics import Metrics


class PrefillMetrics:
    def __init__(self, metrics: Metrics) -> None:
        self.halves = metrics.counter("prefill_halves", "Halves that have ended, by outcome.", ["outcome"])
        self.refused = metrics.counter("prefill_refused", "Halves that were refused, by error code.", ["code"])
        self.chunks = metrics.counter("prefill_chunks", "Chunks provided, by how they were come by.", ["outcome"])
        self.moved_bytes = metrics.counter("prefill_moved_bytes", "Bytes of cached chunks pulled from other nodes.")
        self.tokens = metrics.counter("prefill_tokens", "Prompt tokens provided: reused or computed.", ["kind"])
        self.queue_s = metrics.histogram("prefill_queue", "Time that a half waits for its turn.")
        self.duration_s = metrics.histogram("prefill_duration", "Time from acceptance until all KV is announced.")
        self.running = metrics.gauge("prefill_running", "Halves here, waiting ones included.")

    def count_chunk(self, outcome: ChunkOutcome, num_bytes_moved: int) -> None:
        self.chunks.labels(outcome.value).inc()
        self.moved_bytes.inc(num_bytes_moved)
