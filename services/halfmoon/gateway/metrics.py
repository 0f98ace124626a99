"""The gateway's own figures."""

from halfmoon.tracing.metrics import Metrics

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TBT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)


class GatewayMetrics:
    def __init__(self, metrics: Metrics) -> None:
        self.requests = metrics.counter(
            "gateway_requests",
            "Generation requests that ended, by the status that they ended with: that of the answer, the one a stream "
            "would have had that failed midway, or 499 where the client left.",
            ["endpoint", "status"],
        )
        self.in_flight = metrics.gauge("gateway_requests_in_flight", "Generation requests that haven't ended.")
        self.ttft = metrics.histogram(
            "gateway_ttft", "From a request's arrival to its first token's departure.", buckets=_TTFT_BUCKETS_S
        )
        self.tbt = metrics.histogram("gateway_tbt", "Between two token events of one choice.", buckets=_TBT_BUCKETS_S)
        self.tokens = metrics.counter(
            "gateway_tokens",
            "Tokens of requests that succeeded: `prompt`, `cached` (those of the prompt that came from the pool), "
            "`completion`.",
            ["kind"],
        )
        self.ready = metrics.gauge("gateway_ready", "1 while a real generation has passed end to end.")
