"""Errors as OpenAI's clients know them: one JSON shape, and one HTTP status for each of our codes."""

import math
from dataclasses import dataclass

import msgspec

from halfmoon.schemas.wire import Error, ErrorCode


@dataclass(frozen=True, slots=True)
class _Kind:
    status: int
    type: str
    code: str | None


_KINDS: dict[ErrorCode, _Kind] = {
    ErrorCode.INVALID_MESSAGE: _Kind(400, "invalid_request_error", None),
    ErrorCode.INVALID_REQUEST: _Kind(400, "invalid_request_error", None),
    ErrorCode.PROMPT_TOO_LONG: _Kind(400, "invalid_request_error", "context_length_exceeded"),
    ErrorCode.MODEL_NOT_FOUND: _Kind(404, "invalid_request_error", "model_not_found"),
    ErrorCode.NO_WORKERS: _Kind(503, "server_error", "no_workers"),
    ErrorCode.OVERLOADED: _Kind(429, "rate_limit_error", "overloaded"),
    ErrorCode.BUSY: _Kind(429, "rate_limit_error", "busy"),
    ErrorCode.NO_SPACE: _Kind(503, "server_error", "no_space"),
    ErrorCode.STALE: _Kind(500, "server_error", "stale"),
    ErrorCode.DEADLINE: _Kind(504, "server_error", "deadline_exceeded"),
    ErrorCode.CANCELLED: _Kind(409, "server_error", "cancelled"),
    ErrorCode.WORKER_LOST: _Kind(503, "server_error", "worker_lost"),
    ErrorCode.UNAVAILABLE: _Kind(503, "server_error", "unavailable"),
    ErrorCode.INTERNAL: _Kind(500, "server_error", "internal"),
}

_RETRIABLE = frozenset({429, 503})


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    error: ErrorDetail


class ApiError(Exception):
    """An answer that is an error: raised anywhere below an endpoint, turned into JSON in one place."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(message=message, type=type, param=param, code=code)
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:
        """For metrics and spans: the code where there is one, else the type."""
        return self.detail.code or self.detail.type

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(error=self.detail))

    def headers(self, default_retry_after_s: float) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self.status in _RETRIABLE:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s or default_retry_after_s)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def from_wire(error: Error) -> ApiError:
    """A typed error of the system as the HTTP answer for it."""
    kind = _KINDS[error.code]
    return ApiError(kind.status, error.message, type=kind.type, code=kind.code, retry_after_s=error.retry_after_s)


def refusal(code: ErrorCode, message: str, retry_after_s: float | None = None) -> ApiError:
    """An error that this gateway finds itself."""
    return from_wire(Error(code=code, message=message, retry_after_s=retry_after_s))


def internal_error(request_id: str) -> ApiError:
    """For what should not happen: the details are in the log, under this id."""
    return refusal(ErrorCode.INTERNAL, f"Internal error; the gateway's log has the details under {request_id}")
