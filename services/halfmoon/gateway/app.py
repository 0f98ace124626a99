"""The HTTP routes."""

from collections.abc import Awaitable, Callable

import msgspec
import structlog
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from halfmoon.gateway.answering import Answering
from halfmoon.gateway.auth import tenant_of
from halfmoon.gateway.chat import ChatQuestion
from halfmoon.gateway.cluster import Cluster
from halfmoon.gateway.completions import CompletionQuestion
from halfmoon.gateway.config import GatewayConfig
from halfmoon.gateway.errors import ApiError, internal_error
from halfmoon.gateway.openai_types import ModelBody, ModelList
from halfmoon.gateway.policy import unknown_model
from halfmoon.gateway.readiness import Readiness
from halfmoon.schemas.ids import ModelName

Endpoint = Callable[[Request], Awaitable[Response]]


def build_app(
    *,
    config: GatewayConfig,
    model: ModelName,
    started_ns: int,
    answering: Answering,
    cluster: Cluster,
    readiness: Readiness,
    registry: CollectorRegistry,
    log: structlog.stdlib.BoundLogger,
) -> ASGIApp:
    """The application, with all errors in OpenAI's shape."""
    app = FastAPI(title="halfmoon", openapi_url=None, docs_url=None, redoc_url=None)

    def models() -> list[ModelBody]:
        card = cluster.serving(model).card
        if card is None:
            return []
        created_s = started_ns // 1_000_000_000
        return [ModelBody(id=model, created=created_s, max_model_len=card.max_model_tokens, engine=card.engine)]

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request) -> Response:
        return await answering.answer(request, "chat", ChatQuestion)

    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> Response:
        return await answering.answer(request, "text_completion", CompletionQuestion)

    @app.get("/v1/models", response_model=None)
    async def list_models(request: Request) -> Response:
        tenant_of(request.headers.get("authorization"), config.api_keys)
        return _json(ModelList(data=models()))

    @app.get("/v1/models/{name:path}", response_model=None)
    async def one_model(request: Request, name: str) -> Response:
        tenant_of(request.headers.get("authorization"), config.api_keys)
        for body in models():
            if body.id == name:
                return _json(body)
        raise unknown_model(name, model)

    @app.get("/health", response_model=None)
    async def health() -> Response:
        """The process is alive; says nothing about the rest."""
        return Response(b'{"status":"ok"}', media_type="application/json")

    @app.get("/ready", response_model=None)
    async def ready() -> Response:
        report = readiness.report()
        return _json(report, 200 if report.ready else 503)

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return Response(error.body(), error.status, error.headers(config.retry_after_s))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        found = _of_route(request, error)
        return Response(found.body(), found.status, found.headers(config.retry_after_s) | dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def defect(request: Request, _: Exception) -> Response:
        found = internal_error(f"{request.method} {request.url.path}")
        return Response(found.body(), found.status, found.headers(config.retry_after_s))

    return _Guard(app, log)


def _of_route(request: Request, error: HTTPException) -> ApiError:
    route = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return ApiError(404, f"Unknown request URL: {route}", code="unknown_url")
    if error.status_code == 405:
        return ApiError(405, f"Method not allowed: {route}", code="method_not_allowed")
    return ApiError(error.status_code, str(error.detail))


def _json(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


class _Guard:
    """Logs what no handler caught: it has been answered, without its details, and the server must not hear of it."""

    def __init__(self, app: ASGIApp, log: structlog.stdlib.BoundLogger) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception:
            self._log.exception("an endpoint failed", path=scope.get("path"))
