"""Connections of the reading end of `tcp`: made and proven, used by one read at a time, kept for the next."""

import contextlib
import socket
import threading
from collections import OrderedDict
from collections.abc import Iterator

from halfmoon.schemas.kv_tier import NodeInfo
from halfmoon.transport import tcp_wire as wire
from halfmoon.transport.tcp_stream import Deadline, WireError, prepare

_CONNECT_S = 2.0


class StalePeer(Exception):
    """Another life of the node answers at its address."""


class Operation:
    """One `read`, as its threads and its canceller share it."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline = Deadline(deadline_s)
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._ended = False

    @property
    def is_connected(self) -> bool:
        """Whether any of its threads has a connection, perhaps one that is still being made."""
        return bool(self._connections)

    @contextlib.contextmanager
    def using(self, connection: socket.socket) -> Iterator[None]:
        """Meanwhile a cancellation shuts this connection. Raises TimeoutError where it came already."""
        with self._lock:
            if self._ended:
                raise TimeoutError("the read was given up")
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._connections.discard(connection)

    def end(self) -> None:
        """Make the threads return soon: no operation begins any more, and those that block are woken."""
        with self._lock:
            self._ended = True
            self.deadline.end_now()
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class Connections:
    """Idle connections per peer and epoch, the one used last first. Thread-safe."""

    def __init__(self, secret: bytes | None, *, max_idle: int) -> None:
        """`max_idle`: kept over all peers; the one unused for longest makes room."""
        self._secret = secret
        self._max_idle = max_idle
        self._lock = threading.Lock()
        self._idle: OrderedDict[socket.socket, tuple[str, int]] = OrderedDict()
        self._closed = False

    def take(self, peer: NodeInfo) -> socket.socket | None:
        """An idle connection to this life of the peer. Those to its former lives are closed."""
        wanted = (peer.tcp_address or "", peer.epoch)
        with self._lock:
            for connection in [each for each, (address, _) in self._idle.items() if address == wanted[0]]:
                if self._idle[connection] != wanted:
                    del self._idle[connection]
                    connection.close()
            for connection in reversed(self._idle):
                if self._idle[connection] == wanted:
                    del self._idle[connection]
                    return connection
        return None

    def keep(self, connection: socket.socket, peer: NodeInfo) -> None:
        """For the next read. It must be between requests."""
        with self._lock:
            if self._closed:
                connection.close()
                return
            self._idle[connection] = (peer.tcp_address or "", peer.epoch)
            while len(self._idle) > self._max_idle:
                self._idle.popitem(last=False)[0].close()

    def forget(self, peer: NodeInfo) -> None:
        """Close what is idle to this peer: it has let go of one, so probably of all."""
        with self._lock:
            for connection in [each for each, (address, _) in self._idle.items() if address == peer.tcp_address]:
                del self._idle[connection]
                connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    def connect(self, operation: Operation, peer: NodeInfo) -> socket.socket:
        """A new connection, proven on both ends. Raises OSError, `WireError`, `StalePeer` and TimeoutError."""
        host, _, port = (peer.tcp_address or "").rpartition(":")
        failure: OSError | None = None
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        ):
            connection = socket.socket(family, kind, protocol)
            with closing_on_error(connection), operation.using(connection):
                prepare(connection, str(address[0]))
                connection.settimeout(min(_CONNECT_S, operation.deadline.left()))
                try:
                    connection.connect(address)
                except OSError as error:
                    failure = error
                    connection.close()
                    continue
                connection.settimeout(None)
                self._shake_hands(connection, operation.deadline, peer)
                return connection
        operation.deadline.left()
        if isinstance(failure, TimeoutError):
            raise WireError(f"no connection within {_CONNECT_S:g} s")
        raise failure or OSError(f"no address for {host!r}")

    def _shake_hands(self, connection: socket.socket, deadline: Deadline, peer: NodeInfo) -> None:
        hello = wire.receive_message(connection, wire.HELLO, deadline)
        if hello.secret and self._secret is None:
            raise wire.HandshakeRefused("it expects a cluster_secret, and this node has none: set the same one on both")
        if self._secret is not None and not hello.secret:
            raise wire.HandshakeRefused("it has no cluster_secret, and this node has one: set the same one on both")
        if len(hello.nonce) < wire.NONCE_BYTES:
            raise WireError("its nonce is too short")
        nonce = wire.new_nonce()
        claim = b"" if self._secret is None else wire.proof(self._secret, "client", hello, nonce)
        wire.send_message(connection, wire.Auth(nonce=nonce, proof=claim), deadline)
        answer = wire.receive_message(connection, wire.WELCOME, deadline)
        if isinstance(answer, wire.Refused):
            raise wire.HandshakeRefused(answer.message)
        if self._secret is not None and not wire.proven(self._secret, "server", hello, nonce, answer.proof):
            raise wire.HandshakeRefused("it could not prove that it knows the cluster_secret")
        if (hello.node, hello.epoch) != (peer.node, peer.epoch):
            raise StalePeer(
                f"node {hello.node} in epoch {hello.epoch} answers where {peer.node} in {peer.epoch} was described"
            )


@contextlib.contextmanager
def closing_on_error(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise
