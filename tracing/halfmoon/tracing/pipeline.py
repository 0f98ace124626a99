"""The way from an ended span to an exporter: one bounded queue, one thread, bounded waits.

OpenTelemetry's own batch processor can't bound a flush and logs a line per dropped span; a service that shuts down, or
whose collector is gone, needs the first and can't use the second. Ending a span costs an append, whatever the exporter
does.
"""

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PipelineStats:
    pending: int
    """Ended, not yet given to the exporter."""
    exported: int
    dropped: int
    """Lost because the queue was full, or because they ended after shutdown."""
    failed: int
    """Lost because the exporter could not deliver them."""


class Pipeline(SpanProcessor):
    """Feeds sampled spans to one exporter, in batches, from a thread of its own (a daemon: it never holds an exit).

    The queue holds `max_pending` spans; when it is full the newest are dropped and counted. A batch goes out when
    `max_batch` spans wait, or after `interval_s`. A span is counted exactly once: pending, exported, dropped or failed.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        name: str,
        *,
        max_pending: int = 8192,
        max_batch: int = 512,
        interval_s: float = 0.5,
    ) -> None:
        self.name = name
        self._exporter = exporter
        self._max_pending = max_pending
        self._max_batch = max_batch
        self._interval_s = interval_s
        self._queue: deque[ReadableSpan] = deque()
        self._changed = threading.Condition()
        self._in_flight = 0
        self._exported = 0
        self._dropped = 0
        self._failed = 0
        self._flushing = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"halfmoon-spans-{name}", daemon=True)
        self._thread.start()

    def stats(self) -> PipelineStats:
        with self._changed:
            return PipelineStats(len(self._queue) + self._in_flight, self._exported, self._dropped, self._failed)

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing: only ended spans travel."""

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        with self._changed:
            if self._closed or len(self._queue) >= self._max_pending:
                self._dropped += 1
                return
            self._queue.append(span)
            if len(self._queue) == self._max_batch:
                self._changed.notify_all()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Wait until all that is pending now has been exported or has failed; False when the time was too short."""
        with self._changed:
            self._flushing += 1
            self._changed.notify_all()
            try:
                settled = self._settled() + len(self._queue) + self._in_flight
                return self._changed.wait_for(lambda: self._settled() >= settled, timeout_millis / 1000)
            finally:
                self._flushing -= 1

    def shutdown(self) -> None:
        self.close(timeout_s=5.0)

    def close(self, timeout_s: float) -> bool:
        """Export what is pending, for `timeout_s` at most, then stop. Idempotent. True when nothing was left behind."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            already = self._closed
            self._closed = True
            self._changed.notify_all()
        if already:
            return not self._thread.is_alive()
        self._thread.join(timeout_s)
        with self._changed:
            self._dropped += len(self._queue)
            left = len(self._queue) + self._in_flight
            self._queue.clear()
        # Interrupts an exporter that waits between retries, so that the thread can see the empty queue and end.
        self._exporter.shutdown()
        self._thread.join(max(0.1, deadline - time.monotonic()))
        return left == 0

    def _settled(self) -> int:
        return self._exported + self._failed

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._batch_due, self._interval_s)
                if not self._queue:
                    if self._closed:
                        return
                    continue
                batch = [self._queue.popleft() for _ in range(min(len(self._queue), self._max_batch))]
                self._in_flight = len(batch)
            delivered = self._deliver(batch)
            with self._changed:
                self._in_flight = 0
                if delivered:
                    self._exported += len(batch)
                else:
                    self._failed += len(batch)
                self._changed.notify_all()

    def _batch_due(self) -> bool:
        return self._closed or len(self._queue) >= self._max_batch or (self._flushing > 0 and bool(self._queue))

    def _deliver(self, batch: list[ReadableSpan]) -> bool:
        try:
            return self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception:
            # An exporter of ours returns FAILURE; this one is broken. The thread must outlive it.
            _log.exception("the %s span exporter failed on %d spans, which are lost", self.name, len(batch))
            return False
