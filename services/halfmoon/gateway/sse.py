"""Server-sent events: `data: <json>` and a blank line for each. https://html.spec.whatwg.org/#server-sent-events"""

from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from halfmoon.gateway.connection import ClientLeft, while_connected

DONE = b"data: [DONE]\n\n"


def frame(message: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(message) + b"\n\n"


class EventStream(Response):
    """Sends frames as they come, until they end or the client leaves; then `close` is awaited, in any case.

    A send waits while the client doesn't read, so a slow reader slows its own stream and nothing else.
    """

    media_type = "text/event-stream"

    def __init__(
        self, frames: AsyncGenerator[bytes, None], headers: dict[str, str], close: Callable[[], Awaitable[None]]
    ) -> None:
        self._frames = frames
        self._close = close
        self.status_code = 200
        self.background = None
        # The last one is for nginx, which would otherwise collect the stream before passing it on.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        except (ClientLeft, OSError):
            return
        finally:
            # A generator that was never begun has no `finally` of its own that would run: hence `close`.
            await self._frames.aclose()
            await self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._frames:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
