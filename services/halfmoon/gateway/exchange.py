"""One HTTP request's record: its phase, its span, its figures."""

import time
from collections.abc import Callable

from opentelemetry.trace import SpanKind, Status, StatusCode

from halfmoon.gateway.errors import ApiError
from halfmoon.gateway.metrics import GatewayMetrics
from halfmoon.gateway.openai_types import UsageBody
from halfmoon.gateway.state import LIFE, TERMINAL, Phase, Sign
from halfmoon.machine import Machine
from halfmoon.schemas.ids import RequestId, TenantId
from halfmoon.schemas.requests import FinishReason, Sampling
from halfmoon.tracing import Context, Tracer, attributes, context_of, names, record_error

CLIENT_LEFT_STATUS = 499


class Exchange:
    """Opened when the request arrives; ends with exactly one of `finished`, `failed` and `left`."""

    def __init__(
        self,
        request_id: RequestId,
        endpoint: str,
        tracer: Tracer,
        metrics: GatewayMetrics,
        parent: Context,
        on_end: "Callable[[Exchange], None]",
    ) -> None:
        self.request_id = request_id
        self.endpoint = endpoint
        self.arrived_ns = time.time_ns()
        self.created_s = self.arrived_ns // 1_000_000_000
        self._arrived = time.perf_counter()
        self._machine: Machine[Phase, Sign] = Machine(LIFE, Phase.CHECKING)
        self._metrics = metrics
        self._on_end = on_end
        self._last_token: dict[int, float] = {}
        self._span = tracer.start_span(
            names.GATEWAY_REQUEST,
            kind=SpanKind.SERVER,
            parent=parent,
            start_ns=self.arrived_ns,
            attributes={attributes.REQUEST_ID: request_id, attributes.GEN_AI_OPERATION_NAME: endpoint},
        )
        metrics.in_flight.inc()

    @property
    def phase(self) -> Phase:
        return self._machine.state

    @property
    def context(self) -> Context:
        """The trace that everything done for this request belongs to."""
        return context_of(self._span)

    def submitted(
        self, *, tenant: TenantId, model: str, sampling: Sampling, num_choices: int, stream: bool, prompt_tokens: int
    ) -> None:
        self._machine.fire(Sign.SUBMIT)
        span = self._span
        span.set_attribute(attributes.TENANT, tenant)
        span.set_attribute(attributes.GEN_AI_REQUEST_MODEL, model)
        span.set_attribute(attributes.GEN_AI_REQUEST_TEMPERATURE, sampling.temperature)
        span.set_attribute(attributes.GEN_AI_REQUEST_TOP_P, sampling.top_p)
        span.set_attribute(attributes.GEN_AI_REQUEST_CHOICE_COUNT, num_choices)
        span.set_attribute(attributes.GEN_AI_REQUEST_STREAM, stream)
        span.set_attribute(attributes.GEN_AI_USAGE_INPUT_TOKENS, prompt_tokens)
        if sampling.max_tokens is not None:
            span.set_attribute(attributes.GEN_AI_REQUEST_MAX_TOKENS, sampling.max_tokens)
        if sampling.seed is not None:
            span.set_attribute(attributes.GEN_AI_REQUEST_SEED, sampling.seed)

    def token(self, index: int) -> None:
        """A token of choice `index` has left for the client; TTFT ends with the first of all."""
        now = time.perf_counter()
        if self.phase is Phase.WAITING:
            self._machine.fire(Sign.FIRST_TOKEN)
            ttft_s = now - self._arrived
            self._metrics.ttft.observe(ttft_s)
            self._span.add_event(names.EVENT_FIRST_TOKEN)
            self._span.set_attribute(attributes.TTFT_MS, ttft_s * 1000)
        if (before := self._last_token.get(index)) is not None:
            self._metrics.tbt.observe(now - before)
        self._last_token[index] = now

    def finished(self, model: str, usage: UsageBody, reasons: list[FinishReason]) -> None:
        self._machine.fire(Sign.FINISH)
        cached = usage.prompt_tokens_details.cached_tokens
        for kind, count in (
            ("prompt", usage.prompt_tokens),
            ("cached", cached),
            ("completion", usage.completion_tokens),
        ):
            self._metrics.tokens.labels(kind).inc(count)
        span = self._span
        span.set_attribute(attributes.GEN_AI_RESPONSE_MODEL, model)
        span.set_attribute(attributes.GEN_AI_RESPONSE_FINISH_REASONS, [str(reason) for reason in reasons])
        span.set_attribute(attributes.GEN_AI_USAGE_OUTPUT_TOKENS, usage.completion_tokens)
        span.set_attribute(attributes.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS, cached)
        self._end(200)

    def failed(self, error: ApiError) -> None:
        if self.phase in TERMINAL:
            return
        self._machine.fire(Sign.REJECT if self.phase is Phase.CHECKING else Sign.FAIL)
        if error.status >= 500 or self.phase is Phase.FAILED:
            record_error(self._span, str(error), error.kind)
        else:
            self._span.set_attribute(attributes.ERROR_TYPE, error.kind)
        self._end(error.status)

    def left(self) -> None:
        """The client is gone, or the gateway is about to be. Does nothing once the exchange has ended."""
        if self.phase in TERMINAL:
            return
        self._machine.fire(Sign.LEAVE)
        self._span.set_attribute(attributes.ERROR_TYPE, "client_left")
        self._span.set_status(Status(StatusCode.ERROR, "the client left before the end"))
        self._end(CLIENT_LEFT_STATUS)

    def _end(self, status: int) -> None:
        self._metrics.in_flight.dec()
        self._metrics.requests.labels(self.endpoint, str(status)).inc()
        self._span.set_attribute("http.response.status_code", status)
        self._span.end()
        self._on_end(self)
