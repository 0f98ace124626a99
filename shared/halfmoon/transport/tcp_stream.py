"""Bytes through blocking sockets: many buffers with one system call, each call bounded by a deadline.

The sockets block in the kernel (SO_RCVTIMEO, SO_SNDTIMEO, MSG_WAITALL) rather than in Python's own timeouts, which poll
before each call: a thread then asks for the interpreter lock once for a whole group of slices, and hardly feels it when
an event loop in the same process is busy.
"""

import ipaddress
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final

_MAX_BUFFERS = 1024
"""IOV_MAX of Linux."""
_LOCAL_BUFFER_BYTES = 256 << 10
"""On one machine more would only push the bytes out of the processor's cache on their way (measured: 256 KiB moved them
fastest, the system's own choice of up to 32 MiB slowest). Over a network the system's choice stands: it follows the
delay."""
_TIMEVAL: Final = struct.Struct("@ll")
_MIN_TIMEOUT_S = 0.001
"""A timeout of 0 would mean none."""


class WireError(Exception):
    """The peer broke the protocol, refused, or went away. The message says which."""


class Deadline:
    """A point in monotonic time that bounds every socket operation; another thread may bring it forward to now."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds
        self._ended = False

    def end_now(self) -> None:
        self._ended = True

    def left(self) -> float:
        """Seconds, above zero. Raises TimeoutError where none are left."""
        left = self._at - time.monotonic()
        if self._ended or left <= 0:
            raise TimeoutError("no time left")
        return left

    def bound(self, connection: socket.socket, option: int) -> None:
        """Bound the next operation, with SO_RCVTIMEO or SO_SNDTIMEO. Raises TimeoutError where no time is left."""
        seconds = max(self.left(), _MIN_TIMEOUT_S)
        whole = int(seconds)
        connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(whole, int((seconds - whole) * 1e6)))


def prepare(connection: socket.socket, peer_host: str) -> None:
    """Set up a socket, new or connected. On this machine: before it is connected."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if is_loopback(peer_host):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_BUFFER_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LOCAL_BUFFER_BYTES)


def is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.split("%")[0])
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback or (mapped is not None and mapped.is_loopback)


def receive_exactly(connection: socket.socket, num_bytes: int, deadline: Deadline) -> bytes:
    buffer = bytearray(num_bytes)
    receive_into(connection, [memoryview(buffer)], deadline)
    return bytes(buffer)


def receive_into(connection: socket.socket, parts: Sequence[memoryview], deadline: Deadline) -> None:
    """Fill all parts, in order. Raises `WireError` where the peer ends early, OSError and TimeoutError."""
    waiting = [part for part in parts if len(part)]
    while waiting:
        deadline.bound(connection, socket.SO_RCVTIMEO)
        try:
            count = connection.recvmsg_into(waiting[:_MAX_BUFFERS], 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            raise TimeoutError("nothing came in time") from None
        if count == 0:
            raise WireError("the peer closed the connection")
        waiting = _rest(waiting, count)


def send_all(connection: socket.socket, parts: Sequence[memoryview], deadline: Deadline) -> None:
    """Send all parts, in order, straight from where they lie. When it returns, nothing refers to them any more.

    Raises OSError, and TimeoutError.
    """
    waiting = [part for part in parts if len(part)]
    while waiting:
        deadline.bound(connection, socket.SO_SNDTIMEO)
        try:
            count = connection.sendmsg(waiting[:_MAX_BUFFERS])
        except BlockingIOError:
            raise TimeoutError("the peer took nothing in time") from None
        waiting = _rest(waiting, count)


def _rest(parts: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of these parts behind their first `num_bytes`."""
    for index, part in enumerate(parts):
        if num_bytes < len(part):
            return [part[num_bytes:], *parts[index + 1 :]]
        num_bytes -= len(part)
    return []
