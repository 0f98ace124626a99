"""What the conductor measures."""

from collections.abc import Iterable, Mapping

from halfmoon.conductor.forecasts import Forecasts
from halfmoon.conductor.state import RequestState
from halfmoon.scheduling.fairness import Share
from halfmoon.schemas.ids import ModelName, TenantId, WorkerId
from halfmoon.schemas.requests import Usage
from halfmoon.schemas.scheduling import CostModel, Forecast
from halfmoon.tracing.metrics import Metrics
from halfmoon.tracing.tenants import OTHER, TenantCollector, TenantCounts, biggest


class Instruments:
    """All are named `halfmoon_conductor_…`."""

    def __init__(self, metrics: Metrics) -> None:
        self._requests = metrics.counter("conductor_requests", "Requests by how they left this conductor.", ["outcome"])
        self._refusals = metrics.counter(
            "conductor_refusals", "Requests that this conductor ended, by error.", ["code"]
        )
        self._rejections = metrics.counter(
            "conductor_rejections",
            "Requests not admitted, by reason (ttft, tbt, full, deadline) and class of service.",
            ["reason", "service_class"],
        )
        self._waits = metrics.histogram(
            "conductor_wait", "Time that requests waited for a worker with room; of those that did.", ["service_class"]
        )
        self._waiting = metrics.gauge(
            "conductor_waiting", "Requests that wait for a worker with room.", ["service_class", "tenant"]
        )
        self.undecodable = metrics.counter("conductor_undecodable", "Messages that were no request.")
        self.no_reply = metrics.counter("conductor_no_reply", "Requests without a subject to reply to.")
        self._moves = metrics.counter("conductor_moves", "Halves that moved because their worker was lost.", ["half"])
        self._asked = metrics.counter("conductor_halves", "Halves sent to workers, by answer.", ["half", "answer"])
        self.adopted = metrics.counter("conductor_adopted", "Redelivered requests that were found running.")
        self.open_requests = metrics.gauge("conductor_open_requests", "Requests that this conductor owns now.")
        self.index_chunks = metrics.gauge("conductor_index_chunks", "Distinct chunks in the index.")
        self.decision = metrics.histogram("conductor_decision", "Time to match and rank, without asking workers.")
        self.matched_chunks = metrics.counter("conductor_matched_chunks", "Chunks of prompts that were in some pool.")
        self._hits = metrics.counter(
            "conductor_hits", "Chunks of prompts placed, by where they are to be found: hbm, local, remote.", ["tier"]
        )
        self._hot_chunks = metrics.gauge(
            "conductor_hot_chunks", "Chunks known to be in the prefix cache of a worker's engine.", ["worker"]
        )
        self.alone = metrics.gauge(
            "conductor_workers_without_partner", "Workers that no worker of the other role can pass KV to or from."
        )
        self._copies = metrics.counter(
            "conductor_copies_ordered",
            "Chunks that pools were told to bring, by cause and answer.",
            ["cause", "answer"],
        )
        self._model_error = metrics.gauge(
            "conductor_cost_model_error",
            "Running mean of |predicted - measured| / measured, of the cost models with most samples.",
            ["kind", "subject"],
        )
        self._model_samples = metrics.gauge(
            "conductor_cost_model_samples", "Measurements that a cost model was fitted to.", ["kind", "subject"]
        )
        self._forecast_error = metrics.gauge(
            "conductor_forecast_error",
            "Running mean of |predicted - measured| / measured, of TTFT and TBT of the requests placed.",
            ["kind"],
        )
        self._forecast_s = metrics.gauge(
            "conductor_forecast",
            "Running means of TTFT and TBT: predicted, measured.",
            ["kind", "value"],
            unit="seconds",
        )
        self.balancing_threshold = metrics.gauge(
            "conductor_balancing_threshold", "How much longer a match elsewhere has to be to be pulled (kv_centric)."
        )
        self.imbalance = metrics.gauge(
            "conductor_prefill_imbalance", "Longest queue of a prefill worker over the mean, lately (kv_centric)."
        )
        self.forecasts = Forecasts()
        self.prompt_chunks = metrics.counter("conductor_prompt_chunks", "Whole chunks of all prompts placed.")

        self.prompt_tokens = self.cached_tokens = 0
        """Of all requests, for heartbeats."""
        self._tenant_tokens = TenantCounts()
        metrics.registry.register(
            TenantCollector(
                "conductor_tenant_tokens",
                "Tokens of requests that a decode worker has ended, whether finished, cancelled or failed midway.",
                self._tenant_tokens,
                {"prompt": "prompt", "cached": "cached", "completion": "completion"},
            )
        )

    def used(self, tenant: TenantId, model: ModelName, usage: Usage) -> None:
        """What one request took, for its tenant's account."""
        amounts = {
            "prompt": usage.prompt_tokens,
            "cached": usage.cached_tokens,
            "completion": usage.completion_tokens,
        }
        self._tenant_tokens.add(tenant, model, amounts)
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens

    def copies_ordered(self, cause: str, answer: str, num_chunks: int) -> None:
        if num_chunks:
            self._copies.labels(cause, answer).inc(num_chunks)

    def cost_models(self, models: Iterable[CostModel]) -> None:
        """Those that there are; models that were forgotten are no longer shown."""
        self._model_error.clear()
        self._model_samples.clear()
        for model in models:
            self._model_error.labels(model.kind, model.subject).set(model.error)
            self._model_samples.labels(model.kind, model.subject).set(model.num_samples)

    def forecast(self, kind: str, forecast: Forecast) -> None:
        self._forecast_error.labels(kind).set(forecast.error)
        self._forecast_s.labels(kind, "predicted").set(forecast.predicted_s)
        self._forecast_s.labels(kind, "measured").set(forecast.measured_s)

    def left(self, state: RequestState) -> None:
        self._requests.labels(state.value).inc()

    def refused(self, code: str) -> None:
        self._refusals.labels(code).inc()

    def rejected(self, reason: str, service_class: str) -> None:
        self._rejections.labels(reason, service_class).inc()

    def waited(self, service_class: str, seconds: float) -> None:
        self._waits.labels(service_class).observe(seconds)

    def waiting(self, num_waiting: Mapping[Share, int]) -> None:
        """Of the tenants with most, by name; of the others together."""
        self._waiting.clear()
        named = biggest([(share.tenant, count) for share, count in num_waiting.items()])
        for share, count in num_waiting.items():
            tenant = share.tenant if share.tenant in named else OTHER
            self._waiting.labels(share.service_class, tenant).inc(count)

    def moved(self, half: str) -> None:
        self._moves.labels(half).inc()

    def planned(self, hits: Mapping[str, int]) -> None:
        for tier, count in hits.items():
            self._hits.labels(tier).inc(count)

    def hot(self, num_chunks: Mapping[WorkerId, int]) -> None:
        """Of every worker that is there and tells; the others are no longer shown."""
        self._hot_chunks.clear()
        for worker, count in num_chunks.items():
            self._hot_chunks.labels(worker).set(count)

    def asked(self, half: str, answer: str) -> None:
        self._asked.labels(half, answer).inc()
