"""The serving end of `tcp`: dedicated threads that send slots of the arena to whoever holds a lease on them."""

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence

from halfmoon.pool.arena import Arena
from halfmoon.schemas.ids import LeaseId, NodeId
from halfmoon.transport import tcp_wire as wire
from halfmoon.transport.protocol import ReadOutcome
from halfmoon.transport.tcp_stream import Deadline, WireError, is_loopback, prepare, send_all

__all__ = ["Authorize", "TcpServer", "is_loopback"]

Authorize = Callable[[LeaseId, int, int, int], tuple[ReadOutcome, str] | None]
"""`(lease, slot, generation, end of the range in the slot)` → why it may not be read now, or None. Called from threads,
before a slice is copied out of the arena and again after."""

_HANDSHAKE_S = 5.0
_IDLE_S = 300.0
"""A reader that asks nothing for this long is let go; it connects again when it needs to."""
_SEND_S = 30.0
_SLOWEST_BYTES_PER_S = 1 << 20
"""A reader that takes longer than `_SEND_S`, and then no bytes at this speed, is taken for dead."""
_STATUS = {ReadOutcome.STALE: wire.Status.STALE, ReadOutcome.REFUSED: wire.Status.REFUSED}


class TcpServer:
    """Serves one arena. `start` binds and returns; `close` ends every connection and joins every thread."""

    def __init__(
        self,
        arena: Arena,
        node: NodeId,
        epoch: int,
        authorize: Authorize,
        *,
        secret: str | None,
        host: str = "127.0.0.1",
        port: int = 0,
        max_connections: int = 256,
    ) -> None:
        """`secret` None: only loopback peers are served."""
        self._arena = arena
        self._node = node
        self._epoch = epoch
        self._authorize = authorize
        self._secret = None if secret is None else secret.encode()
        self._bind = (host, port)
        self._max_connections = max_connections
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._closed = False
        self.bytes_served = 0
        self.num_refused = 0
        """Connections that were turned away."""

    @property
    def address(self) -> str:
        """`host:port`, after `start`."""
        if self._listener is None:
            raise RuntimeError("the tcp server isn't started")
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def start(self) -> None:
        """Raises OSError where the address can't be bound."""
        family = socket.AF_INET6 if ":" in self._bind[0] else socket.AF_INET
        self._listener = socket.create_server(self._bind, family=family, backlog=128)
        self._acceptor = threading.Thread(target=self._accept, args=(self._listener,), name="tcp-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Blocks until no thread touches the arena any more. Idempotent."""
        with self._lock:
            self._closed = True
            open_now = dict(self._connections)
        if self._listener is not None:
            _shut(self._listener)
        for connection in open_now:
            _shut(connection)
        if self._acceptor is not None:
            self._acceptor.join()
        for thread in open_now.values():
            thread.join()
        if self._listener is not None:
            self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, address = listener.accept()
            except OSError:
                if self._closed:
                    return
                continue  # The peer was gone before it was accepted, or descriptors ran out for a moment.
            thread = threading.Thread(
                target=self._serve, args=(connection, str(address[0])), name="tcp-serve", daemon=True
            )
            with self._lock:
                if self._closed or len(self._connections) >= self._max_connections:
                    self.num_refused += 1
                    connection.close()
                    continue
                self._connections[connection] = thread
                thread.start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        try:
            with connection:
                prepare(connection, peer)
                self._shake_hands(connection, peer)
                while not self._closed:
                    request = wire.receive_message(
                        connection, wire.READ_REQUEST, Deadline(_IDLE_S), wire.MAX_FRAME_BYTES
                    )
                    self._answer(connection, request)
        except wire.HandshakeRefused:
            self.num_refused += 1
        except (WireError, OSError):
            return  # The reader has left, or doesn't speak our protocol: its loss alone.
        finally:
            with self._lock:
                self._connections.pop(connection, None)

    def _shake_hands(self, connection: socket.socket, peer: str) -> None:
        deadline = Deadline(_HANDSHAKE_S)
        hello = wire.Hello(node=self._node, epoch=self._epoch, nonce=wire.new_nonce(), secret=self._secret is not None)
        wire.send_message(connection, hello, deadline)
        auth = wire.receive_message(connection, wire.AUTH, deadline)
        if self._secret is None and not is_loopback(peer):
            refusal = "node has no cluster_secret, so it serves only its own machine: set the same one on every node"
        elif self._secret is not None and not wire.proven(self._secret, "client", hello, auth.nonce, auth.proof):
            refusal = "the cluster_secret doesn't match this node's"
        else:
            answer = b"" if self._secret is None else wire.proof(self._secret, "server", hello, auth.nonce)
            wire.send_message(connection, wire.Welcome(proof=answer), deadline)
            return
        wire.send_message(connection, wire.Refused(message=refusal), deadline)
        raise wire.HandshakeRefused(refusal)

    def _answer(self, connection: socket.socket, request: wire.ReadRequest) -> None:
        """See `tcp_wire` for the layout. A group's second statuses travel with what comes behind them."""
        if len(request.slices) > wire.MAX_SLICES:
            raise WireError(f"{len(request.slices)} slices in one request, where {wire.MAX_SLICES} are the most")
        reasons: dict[int, str] = {}
        tail = b""
        for group in wire.groups([each.num_bytes for each in request.slices]):
            before = self._checks(request, group, reasons)
            sent = [position for position, status in zip(group, before, strict=True) if status is wire.Status.OK]
            payloads = [self._payload(request.slices[position]) for position in sent]
            _send(connection, [memoryview(tail + bytes(before)), *payloads])
            with self._lock:
                self.bytes_served += sum(len(each) for each in payloads)
            tail = bytes(self._checks(request, sent, reasons))
        if reasons:
            tail += wire.frame(wire.Reasons(reasons=tuple(reason for _, reason in sorted(reasons.items()))))
        _send(connection, [memoryview(tail)])

    def _payload(self, wanted: wire.WireSlice) -> memoryview:
        return self._arena.slot(wanted.slot, wanted.num_bytes, wanted.offset)

    def _checks(
        self, request: wire.ReadRequest, positions: Sequence[int], reasons: dict[int, str]
    ) -> list[wire.Status]:
        """How these slices stand now. Why not, for those that can't be had, goes into `reasons`, by position."""
        found = []
        for position in positions:
            status, reason = self._check(request.lease_id, request.slices[position])
            found.append(status)
            if status is not wire.Status.OK:
                reasons[position] = reason.encode()[: wire.MAX_REASON_BYTES].decode(errors="ignore")
        return found

    def _check(self, lease_id: LeaseId, each: wire.WireSlice) -> tuple[wire.Status, str]:
        end = each.offset + each.num_bytes
        if not 0 <= each.slot < self._arena.num_slots or min(each.offset, each.num_bytes) < 0:
            return wire.Status.REFUSED, f"slot {each.slot}, bytes [{each.offset}, {end}): no such place"
        if end > self._arena.slot_bytes:
            return wire.Status.REFUSED, f"bytes [{each.offset}, {end}) of a slot of {self._arena.slot_bytes}"
        refusal = self._authorize(lease_id, each.slot, each.generation, end)
        return (wire.Status.OK, "") if refusal is None else (_STATUS[refusal[0]], refusal[1])


def _send(connection: socket.socket, parts: Sequence[memoryview]) -> None:
    seconds = _SEND_S + sum(len(part) for part in parts) / _SLOWEST_BYTES_PER_S
    send_all(connection, parts, Deadline(seconds))


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # Not connected any more: then nobody waits in it.
        connection.shutdown(socket.SHUT_RDWR)
