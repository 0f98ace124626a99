"""uvicorn inside a service: on a socket of ours, without signal handlers of its own."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from halfmoon.gateway.config import GatewayConfig
from halfmoon.lifecycle import StartupError

_BACKLOG = 2048
_STOP_TIMEOUT_S = 1
"""Requests that still run at a stop are cancelled after this: drain has given them their time."""


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The process's signals are the lifecycle's."""
        yield


class HttpServer:
    """1. `bind` 2. `start` 3. `stop`, idempotent, also after any earlier step failed."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._socket: socket.socket | None = None
        self._server: _Uvicorn | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """As a URL; empty before `bind`."""
        if self._socket is None:
            return ""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def bind(self) -> None:
        """Take the port. Raises `StartupError`."""
        host, port = self._config.host, self._config.port
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise StartupError(f"host {host!r} (HALFMOON_GATEWAY_HOST) is no address: {error.strerror}") from None
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            raise StartupError(
                f"can't listen on {host}:{port}: {error.strerror}; choose another port (HALFMOON_GATEWAY_PORT, 0 for "
                "any free one) or host (HALFMOON_GATEWAY_HOST)"
            ) from None
        self._socket = listener

    async def start(self, app: ASGIApp) -> None:
        """Serve `app`; returns when requests are taken."""
        if self._socket is None:
            raise RuntimeError("bind before start")
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=_STOP_TIMEOUT_S,
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http server")
        up = asyncio.create_task(self._server.up.wait())
        try:
            await asyncio.wait((up, self._serving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            up.cancel()
        if self._serving.done():
            self._serving.result()
            raise StartupError("the HTTP server ended while it started")

    async def stop(self) -> None:
        """Take no more connections, cancel what runs, and close."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait((self._serving,), timeout=_STOP_TIMEOUT_S + 2.0)
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
            self._server = self._serving = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
