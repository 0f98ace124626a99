"""The reading end of `tcp`: blocking sockets in threads of their own, `recv_into` straight into the destinations."""

import asyncio
import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from halfmoon.schemas.ids import LeaseId
from halfmoon.schemas.kv_tier import NodeInfo
from halfmoon.transport import tcp_wire as wire
from halfmoon.transport.protocol import ReadOutcome, SliceRead, SliceResult
from halfmoon.transport.slices import all_failed, ended, failed, seconds_left

_CONNECT_S = 2.0
_OUTCOMES = {wire.Status.STALE: ReadOutcome.STALE, wire.Status.REFUSED: ReadOutcome.REFUSED}


class _StalePeer(Exception):
    """Another life of the node answers at its address."""


class _Operation:
    """One `read`, as its thread and its canceller share it."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline = wire.Deadline(deadline_s)
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self.ended = False

    def use(self, connection: socket.socket) -> None:
        """From now on a cancellation shuts this connection. Raises TimeoutError where it came already."""
        with self._lock:
            if self.ended:
                raise TimeoutError("the read was given up")
            self._connection = connection

    def end(self) -> None:
        """Make the thread return soon: no operation begins any more, and the one that blocks is woken."""
        with self._lock:
            self.ended = True
            self.deadline.end_now()
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)


class TcpTransport:
    """Reads from any peer that serves tcp and knows the secret. Idle connections are kept, per peer and epoch."""

    name = "tcp"

    def __init__(self, secret: str | None, *, max_reads: int = 8, max_idle_per_peer: int = 4) -> None:
        self._secret = None if secret is None else secret.encode()
        self._max_idle = max_idle_per_peer
        self._threads = ThreadPoolExecutor(max_reads, thread_name_prefix="tcp-read")
        self._operations: set[_Operation] = set()
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, int], deque[socket.socket]] = {}
        self._closed = False

    def unavailable(self, peer: NodeInfo) -> str | None:
        if self._closed:
            return "the transport is closed"
        return f"node {peer.node} serves no tcp" if peer.tcp_address is None else None

    async def read(
        self, peer: NodeInfo, lease_id: LeaseId, slices: Sequence[SliceRead], *, deadline_ns: int
    ) -> list[SliceResult]:
        if (reason := self.unavailable(peer)) is not None:
            return all_failed(slices, ReadOutcome.UNREACHABLE, reason)
        operation = _Operation(seconds_left(deadline_ns))
        self._operations.add(operation)
        submitted = self._threads.submit(self._read, operation, peer, lease_id, slices)
        work = asyncio.wrap_future(submitted)
        try:
            return await asyncio.shield(work)
        finally:
            if not work.done():
                operation.end()
            await ended(work)
            self._operations.discard(operation)

    async def close(self) -> None:
        self._closed = True
        for operation in list(self._operations):
            operation.end()
        await asyncio.to_thread(self._threads.shutdown)
        with self._lock:
            for connections in self._idle.values():
                for connection in connections:
                    connection.close()
            self._idle.clear()

    def _read(
        self, operation: _Operation, peer: NodeInfo, lease_id: LeaseId, slices: Sequence[SliceRead]
    ) -> list[SliceResult]:
        """In a thread: all slices over one connection, in requests of bounded size."""
        results: list[SliceResult] = []
        outcome, detail = ReadOutcome.UNREACHABLE, ""
        try:
            connection, reused = self._connection(operation, peer)
            while True:
                try:
                    with _closing_on_error(connection):
                        for start in range(len(results), len(slices), wire.MAX_SLICES):
                            batch = slices[start : start + wire.MAX_SLICES]
                            _read_batch(connection, operation.deadline, lease_id, batch, results)
                    break
                except (wire.WireError, ConnectionError):
                    if results or not reused:
                        raise
                # The peer had let go of this idle connection: only a fresh one tells whether the peer is there.
                connection, reused = self._connection(operation, peer, fresh=True)
            self._keep(connection, peer)
        except TimeoutError:
            outcome, detail = ReadOutcome.DEADLINE, f"node {peer.node} at {peer.tcp_address} did not answer in time"
        except _StalePeer as error:
            outcome, detail = ReadOutcome.STALE, str(error)
        except (wire.WireError, OSError, ValueError) as error:
            detail = f"node {peer.node} at {peer.tcp_address}: {error}"
        return results + [failed(outcome, detail) for _ in slices[len(results) :]]

    def _connection(self, operation: _Operation, peer: NodeInfo, *, fresh: bool = False) -> tuple[socket.socket, bool]:
        """A connection to this life of the peer, and whether it has been used before."""
        with self._lock:
            idle = self._idle.get((peer.tcp_address or "", peer.epoch))
            if fresh:
                while idle:
                    idle.popleft().close()
            connection = idle.pop() if idle else None
        if connection is not None:
            with _closing_on_error(connection):
                operation.use(connection)
            return connection, True
        host, _, port = (peer.tcp_address or "").rpartition(":")
        timeout_s = min(_CONNECT_S, operation.deadline.left())
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
        with _closing_on_error(connection):
            operation.use(connection)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._shake_hands(connection, operation.deadline, peer)
        return connection, False

    def _shake_hands(self, connection: socket.socket, deadline: wire.Deadline, peer: NodeInfo) -> None:
        hello = wire.receive_message(connection, wire.HELLO, deadline)
        if hello.secret and self._secret is None:
            raise wire.HandshakeRefused("it expects a cluster_secret, and this node has none: set the same one on both")
        if self._secret is not None and not hello.secret:
            raise wire.HandshakeRefused("it has no cluster_secret, and this node has one: set the same one on both")
        if len(hello.nonce) < wire.NONCE_BYTES:
            raise wire.WireError("its nonce is too short")
        nonce = wire.new_nonce()
        claim = b"" if self._secret is None else wire.proof(self._secret, "client", hello, nonce)
        wire.send_message(connection, wire.Auth(nonce=nonce, proof=claim), deadline)
        answer = wire.receive_message(connection, wire.WELCOME, deadline)
        if isinstance(answer, wire.Refused):
            raise wire.HandshakeRefused(answer.message)
        if self._secret is not None and not wire.proven(self._secret, "server", hello, nonce, answer.proof):
            raise wire.HandshakeRefused("it could not prove that it knows the cluster_secret")
        if (hello.node, hello.epoch) != (peer.node, peer.epoch):
            raise _StalePeer(
                f"node {hello.node} in epoch {hello.epoch} answers where {peer.node} in {peer.epoch} was described"
            )

    def _keep(self, connection: socket.socket, peer: NodeInfo) -> None:
        with self._lock:
            idle = self._idle.setdefault((peer.tcp_address or "", peer.epoch), deque())
            if not self._closed and len(idle) < self._max_idle:
                idle.append(connection)
                return
        connection.close()


@contextlib.contextmanager
def _closing_on_error(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _read_batch(
    connection: socket.socket,
    deadline: wire.Deadline,
    lease_id: LeaseId,
    slices: Sequence[SliceRead],
    results: list[SliceResult],
) -> None:
    """Ask for these slices and take the answers, appending each result as it is known."""
    wanted = tuple(
        wire.WireSlice(slot=each.slot, generation=each.generation, offset=each.offset, num_bytes=len(each.destination))
        for each in slices
    )
    wire.send_message(connection, wire.ReadRequest(lease_id=lease_id, slices=wanted), deadline)
    for each in slices:
        started_ns = time.time_ns()
        status, reason = wire.receive_status(connection, deadline)
        if status is wire.Status.OK:
            wire.receive_into(connection, each.destination, deadline)
            status, reason = wire.receive_status(connection, deadline)
        if status is wire.Status.OK:
            results.append(SliceResult(ReadOutcome.OK, started_ns, time.time_ns()))
        else:
            results.append(failed(_OUTCOMES[status], reason, started_ns))
