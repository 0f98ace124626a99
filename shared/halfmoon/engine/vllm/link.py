"""A rank's end of the socket to the engine: reads orders in a thread, sends reports from any."""

import contextlib
import socket
import threading
from collections.abc import Callable

from halfmoon.engine.vllm.messages import LENGTH, MAX_FRAME_BYTES, ORDERS, Order, Report, frame

_CONNECT_S = 30.0


class Link:
    """Connected from its making on. Raises OSError where the engine isn't there."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_CONNECT_S)
        self._socket.connect(path)
        self._socket.settimeout(None)
        self._sending = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def start(self, take: Callable[[Order], None], lost: Callable[[], None]) -> None:
        """Hand each order to `take`, until `close` is called. `lost` is told where the engine goes before that."""
        self._thread = threading.Thread(target=self._read, args=(take, lost), name="halfmoon-orders", daemon=True)
        self._thread.start()

    def send(self, report: Report) -> None:
        """A report that nobody reads any more is lost: the engine has gone, and this process goes with it."""
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(frame(report))

    def close(self) -> None:
        """Idempotent."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join()
        self._socket.close()

    def _read(self, take: Callable[[Order], None], lost: Callable[[], None]) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("rb") as stream:
            while len(header := stream.read(LENGTH.size)) == LENGTH.size:
                (length,) = LENGTH.unpack(header)
                if length > MAX_FRAME_BYTES:
                    break
                take(ORDERS.decode(stream.read(length)))
        if not self._is_closed:
            lost()
