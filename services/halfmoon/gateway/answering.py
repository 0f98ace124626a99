"""A generation request, from its arrival to the end of its answer."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import msgspec
import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from halfmoon.bus.protocol import Bus
from halfmoon.client import GenerateClient
from halfmoon.gateway import policy
from halfmoon.gateway.auth import tenant_of
from halfmoon.gateway.cluster import Cluster
from halfmoon.gateway.config import GatewayConfig
from halfmoon.gateway.connection import ClientLeft, while_connected
from halfmoon.gateway.errors import ApiError, ErrorBody, from_wire, internal_error, refusal
from halfmoon.gateway.exchange import CLIENT_LEFT_STATUS, Exchange
from halfmoon.gateway.generation import run_plan
from halfmoon.gateway.metrics import GatewayMetrics
from halfmoon.gateway.policy import Plan
from halfmoon.gateway.rendering import Answer, Collected, Head, Question, usage_of
from halfmoon.gateway.sse import DONE, EventStream, frame
from halfmoon.schemas.ids import ModelName, new_request_id
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.requests import Failed, Finished, FinishReason, TokenEvent, Tokens, Usage
from halfmoon.schemas.wire import ErrorCode
from halfmoon.text import TextCodec
from halfmoon.tracing import Tracer, extract

HEADER_REQUEST_ID = "x-request-id"

Read = Callable[[bytes, GatewayConfig], Question]
Events = AsyncGenerator[tuple[int, TokenEvent], None]


class Answering:
    """Answers questions of either endpoint."""

    def __init__(
        self,
        *,
        config: GatewayConfig,
        model: ModelName,
        bus: Bus,
        client: GenerateClient,
        codec: TextCodec,
        cluster: Cluster,
        tracer: Tracer,
        metrics: GatewayMetrics,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._config = config
        self._model = model
        self._bus = bus
        self._client = client
        self._codec = codec
        self._cluster = cluster
        self._tracer = tracer
        self._metrics = metrics
        self._log = log
        self._threads = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenize")
        self._open: set[Exchange] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    async def answer(self, request: Request, endpoint: str, read: Read) -> Response:
        """Never raises, but for a cancel: every failure is an answer, in OpenAI's shape."""
        exchange = Exchange(
            new_request_id(), endpoint, self._tracer, self._metrics, extract(request.headers), self._closed
        )
        self._open.add(exchange)
        self._idle.clear()
        handed_on = False
        try:
            response = await self._answer(request, exchange, read)
            handed_on = isinstance(response, EventStream)
            return response
        except ApiError as error:
            exchange.failed(error)
            return self._error_response(error, exchange)
        except (ClientLeft, ClientDisconnect):
            # Nobody is there to read it.
            return Response(status_code=CLIENT_LEFT_STATUS)
        except Exception:
            self._log.exception("a request failed", request_id=exchange.request_id)
            internal = internal_error(exchange.request_id)
            exchange.failed(internal)
            return self._error_response(internal, exchange)
        finally:
            if not handed_on:
                exchange.left()

    async def drain(self) -> None:
        """Refuse what comes, and wait for what runs."""
        self._draining = True
        await self._idle.wait()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _closed(self, exchange: Exchange) -> None:
        self._open.discard(exchange)
        if not self._open:
            self._idle.set()

    async def _answer(self, request: Request, exchange: Exchange, read: Read) -> Response:
        if self._draining:
            raise refusal(ErrorCode.UNAVAILABLE, "This gateway is shutting down; try again, on another")
        tenant = tenant_of(request.headers.get("authorization"), self._config.api_keys)
        question = read(await _body(request, self._config.max_body_bytes), self._config)
        if question.model != self._model:
            raise policy.unknown_model(question.model, self._model)
        card = self._card()
        # The tokenizer works outside of the interpreter lock; a long prompt must not hold up the others' tokens.
        prompts = await asyncio.get_running_loop().run_in_executor(self._threads, question.prompts, self._codec, card)
        service_class = self._config.tenant_classes.get(tenant, question.service_class)
        plan = policy.fan_out(exchange.request_id, self._model, tenant, prompts, question.num_choices, service_class)
        exchange.submitted(
            tenant=tenant,
            model=self._model,
            sampling=prompts[0][1],
            num_choices=question.num_choices,
            stream=question.stream,
            prompt_tokens=plan.prompt_tokens,
        )
        answer = question.answer(self._head(exchange, question, card), self._codec)
        deadline_ns = exchange.arrived_ns + int(self._config.request_timeout_s * 1e9)
        events = run_plan(self._client, plan, deadline_ns=deadline_ns, context=exchange.context)
        headers: dict[str, str] = {HEADER_REQUEST_ID: exchange.request_id}
        try:
            if not question.stream:
                body = await while_connected(request.receive, self._whole(exchange, plan, answer, events))
                return Response(body, media_type="application/json", headers=headers)
            # The status line waits for the first event: a refusal then still has a status of its own.
            first = await while_connected(request.receive, _next(events))
            if isinstance(first[1], Failed):
                raise from_wire(first[1].error)
        except BaseException:
            await events.aclose()
            raise

        async def close() -> None:
            await events.aclose()
            exchange.left()

        return EventStream(self._frames(exchange, plan, answer, first, events), headers, close)

    def _card(self) -> ModelCard:
        """The served model's limits. Raises `ApiError` 503 where it can't be served now."""
        if not self._bus.is_connected:
            raise refusal(ErrorCode.UNAVAILABLE, "The message broker can't be reached; try again shortly")
        serving = self._cluster.serving(self._model)
        if serving.card is None or serving.missing:
            code = ErrorCode.UNAVAILABLE if "conductor" in serving.missing else ErrorCode.NO_WORKERS
            raise refusal(code, f"The model '{self._model}' can't be served now; missing: {', '.join(serving.missing)}")
        return serving.card

    def _head(self, exchange: Exchange, question: Question, card: ModelCard) -> Head:
        prefix = "chatcmpl" if exchange.endpoint == "chat" else "cmpl"
        return Head(
            id=f"{prefix}-{exchange.request_id.removeprefix('req-')}",
            created_s=exchange.created_s,
            model=self._model,
            fingerprint=f"fp_{card.fingerprint[:12]}",
            include_usage=question.include_usage,
        )

    async def _whole(self, exchange: Exchange, plan: Plan, answer: Answer, events: Events) -> bytes:
        choices = [Collected() for _ in plan.submissions]
        usages: dict[int, Usage] = {}
        async with aclosing(events):
            async for index, event in events:
                match event:
                    case Tokens():
                        choices[index].add(event)
                        exchange.token(index)
                    case Finished():
                        choices[index].finish(event)
                        usages[index] = event.usage
                    case Failed():
                        raise from_wire(event.error)
        usage = usage_of(plan, [usages[index] for index in range(len(choices))])
        body = msgspec.json.encode(answer.whole(choices, usage))
        exchange.finished(self._model, usage, [choice.finish_reason or FinishReason.STOP for choice in choices])
        return body

    async def _frames(
        self, exchange: Exchange, plan: Plan, answer: Answer, first: tuple[int, TokenEvent], events: Events
    ) -> AsyncGenerator[bytes, None]:
        finished: dict[int, Finished] = {}
        index, event = first
        try:
            async with aclosing(events):
                while True:
                    match event:
                        case Tokens():
                            for chunk in answer.tokens(index, event):
                                yield frame(chunk)
                            exchange.token(index)
                        case Finished():
                            finished[index] = event
                            for chunk in answer.finish(index, event):
                                yield frame(chunk)
                        case Failed():
                            error = from_wire(event.error)
                            exchange.failed(error)
                            yield frame(ErrorBody(error=error.detail))
                            return
                    if len(finished) == len(plan.submissions):
                        break
                    index, event = await anext(events)
            ends = [finished[at] for at in range(len(plan.submissions))]
            usage = usage_of(plan, [end.usage for end in ends])
            exchange.finished(self._model, usage, [end.finish_reason for end in ends])
            if (last := answer.usage(usage)) is not None:
                yield frame(last)
            yield DONE
        except Exception:
            self._log.exception("a stream failed", request_id=exchange.request_id)
            error = internal_error(exchange.request_id)
            exchange.failed(error)
            yield frame(ErrorBody(error=error.detail))

    def _error_response(self, error: ApiError, exchange: Exchange) -> Response:
        headers = error.headers(self._config.retry_after_s) | {HEADER_REQUEST_ID: exchange.request_id}
        return Response(error.body(), error.status, headers)


async def _next(events: Events) -> tuple[int, TokenEvent]:
    return await anext(events)


async def _body(request: Request, max_bytes: int) -> bytes:
    """Raises `ApiError` 413 as soon as it is certain."""
    too_large = ApiError(413, f"The body is larger than the {max_bytes} bytes that are taken", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    parts: list[bytes] = []
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise too_large
        parts.append(part)
    return b"".join(parts)
