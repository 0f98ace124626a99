"""What the decode service counts."""

from halfmoon.schemas.chunks import ChunkOutcome
from halfmoon.tracing.metrics import Metrics


class DecodeMetrics:
    def __init__(self, metrics: Metrics) -> None:
        self.halves = metrics.counter("decode_halves", "Halves that have ended, by outcome.", ["outcome"])
        self.refused = metrics.counter("decode_refused", "Halves that were refused, by error code.", ["code"])
        self.chunks = metrics.counter("decode_chunks", "Chunks pulled, by what became of them.", ["outcome"])
        self.moved_bytes = metrics.counter("decode_moved_bytes", "Bytes of chunks pulled from other nodes.")
        self.recomputes = metrics.counter("decode_recomputes", "Prompts whose KV was, in part, computed here.")
        self.tokens = metrics.counter("decode_tokens", "Completion tokens generated.")
        self.early = metrics.gauge("decode_early_transfers", "Transfers announced whose half is not here yet.")
        self.running = metrics.gauge("decode_running", "Halves here, waiting ones included.")
        self.queue_s = metrics.histogram("decode_queue", "Time that a half waits for its turn.")
        self.kv_wait_s = metrics.histogram("decode_kv_wait", "Time from then until the prompt's KV is loaded.")
        self.token_s = metrics.histogram("decode_token", "Time between two tokens of a completion.")

    def count_chunk(self, outcome: ChunkOutcome, num_bytes_moved: int) -> None:
        self.chunks.labels(outcome.value).inc()
        self.moved_bytes.inc(num_bytes_moved)
