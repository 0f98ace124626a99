"""The tcp server against peers that are broken, hostile or lost: each loses its own connection and nothing else."""

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfmoon.schemas.ids import LeaseId
from halfmoon.schemas.kv_tier import NodeInfo
from halfmoon.transport import tcp_server
from halfmoon.transport import tcp_wire as wire
from halfmoon.transport.protocol import ReadOutcome, SliceRead
from halfmoon.transport.tcp import TcpTransport
from halfmoon.transport.tcp_stream import Deadline, receive_exactly
from support.pool_peer import GENERATION, GOOD_LEASE, NODE, SLOT_BYTES, Peer, payload

SECRET = "moon"


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    made = Peer(tmp_path_factory.mktemp("arena"), SECRET)
    yield made
    made.close()


def deadline() -> Deadline:
    return Deadline(10.0)


@contextlib.contextmanager
def connected(peer: Peer) -> Iterator[tuple[socket.socket, wire.Hello]]:
    host, _, port = peer.server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        yield connection, wire.receive_message(connection, wire.HELLO, deadline())


@contextlib.contextmanager
def authenticated(peer: Peer) -> Iterator[socket.socket]:
    with connected(peer) as (connection, hello):
        nonce = wire.new_nonce()
        claim = wire.proof(SECRET.encode(), "client", hello, nonce)
        wire.send_message(connection, wire.Auth(nonce=nonce, proof=claim), deadline())
        assert isinstance(wire.receive_message(connection, wire.WELCOME, deadline()), wire.Welcome)
        yield connection


def send_all_of_it(connection: socket.socket, data: bytes) -> None:
    """Send, and say that no more will come; the server may have hung up meanwhile."""
    with contextlib.suppress(OSError):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)


def ends(connection: socket.socket) -> bool:
    """Whether the server lets go of the connection, having said no more than a refusal."""
    connection.settimeout(10)
    received = b""
    while True:
        try:
            part = connection.recv(1 << 16)
        except ConnectionError:
            return True
        if not part:
            return len(received) < 4096
        received += part


async def still_serves(peer: Peer) -> bool:
    transport, buffer = TcpTransport(SECRET), bytearray(SLOT_BYTES)
    results = await transport.read(
        peer.info,
        GOOD_LEASE,
        [SliceRead(3, GENERATION, 0, memoryview(buffer))],
        deadline_ns=time.time_ns() + 10_000_000_000,
    )
    await transport.close()
    return results[0].outcome is ReadOutcome.OK and bytes(buffer) == payload(3)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=4, max_size=300))
def test_garbage_instead_of_a_handshake_is_hung_up_on(peer: Peer, garbage: bytes) -> None:
    with connected(peer) as (connection, _):
        send_all_of_it(connection, garbage)
        assert ends(connection)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300))
def test_garbage_instead_of_a_request_is_hung_up_on(peer: Peer, garbage: bytes) -> None:
    with authenticated(peer) as connection:
        send_all_of_it(connection, struct.pack(">I", len(garbage)) + garbage)
        assert ends(connection)


async def test_after_all_that_it_still_serves(peer: Peer) -> None:
    assert await still_serves(peer)


@pytest.mark.parametrize("length", [wire.MAX_HANDSHAKE_BYTES + 1, 0xFFFFFFFF])
def test_a_length_beyond_the_bound_ends_it_before_memory_is_taken(peer: Peer, length: int) -> None:
    with connected(peer) as (connection, _):
        connection.sendall(struct.pack(">I", length))
        assert ends(connection)


def test_too_many_slices_end_the_connection(peer: Peer) -> None:
    with authenticated(peer) as connection:
        one = wire.WireSlice(slot=0, generation=GENERATION, offset=0, num_bytes=1)
        request = wire.ReadRequest(lease_id=GOOD_LEASE, slices=(one,) * (wire.MAX_SLICES + 1))
        wire.send_message(connection, request, deadline())
        assert ends(connection)


@pytest.mark.parametrize(
    ("slot", "offset", "num_bytes"),
    [(0, -1, 2), (0, 0, -1), (-1, 0, 1), (8, 0, 1), (0, SLOT_BYTES, 1), (0, 2**62, 2**62), (2**62, 0, 1)],
)
def test_impossible_ranges_are_refused_each_for_itself(peer: Peer, slot: int, offset: int, num_bytes: int) -> None:
    bad = wire.WireSlice(slot=slot, generation=GENERATION, offset=offset, num_bytes=num_bytes)
    good = wire.WireSlice(slot=1, generation=GENERATION, offset=5, num_bytes=7)
    with authenticated(peer) as connection:
        wire.send_message(connection, wire.ReadRequest(lease_id=GOOD_LEASE, slices=(bad, good)), deadline())
        assert receive_exactly(connection, 2, deadline()) == bytes([wire.Status.REFUSED, wire.Status.OK])
        assert receive_exactly(connection, 7, deadline()) == payload(1)[5:12]
        assert receive_exactly(connection, 1, deadline()) == bytes([wire.Status.OK])
        (reason,) = wire.receive_message(connection, wire.REASONS, deadline()).reasons
        assert str(slot if slot else offset) in reason


def test_a_proof_is_good_for_one_connection_only(peer: Peer) -> None:
    with connected(peer) as (_, hello):
        nonce = wire.new_nonce()
        heard = wire.Auth(nonce=nonce, proof=wire.proof(SECRET.encode(), "client", hello, nonce))
    with connected(peer) as (connection, _):
        wire.send_message(connection, heard, deadline())
        answer = wire.receive_message(connection, wire.WELCOME, deadline())
        assert isinstance(answer, wire.Refused)
        assert ends(connection)


def test_without_a_secret_other_machines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(tmp_path, None)
    monkeypatch.setattr(tcp_server, "is_loopback", lambda host: False)
    try:
        with connected(peer) as (connection, hello):
            assert not hello.secret
            wire.send_message(connection, wire.Auth(nonce=wire.new_nonce()), deadline())
            answer = wire.receive_message(connection, wire.WELCOME, deadline())
            assert isinstance(answer, wire.Refused)
            assert "cluster_secret" in answer.message
            assert ends(connection)
    finally:
        peer.close()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("0.0.0.0", False),
        ("::ffff:10.0.0.1", False),
        ("example.org", False),
    ],
)
def test_what_counts_as_this_machine(host: str, expected: bool) -> None:
    assert tcp_server.is_loopback(host) is expected


async def test_a_server_that_does_not_know_the_secret_is_not_believed(peer: Peer) -> None:
    """An impostor that repeats what it hears can't prove anything, and not a byte is taken from it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        connection, _ = listener.accept()
        with connection:
            hello = wire.Hello(node="peer", epoch=1, nonce=wire.new_nonce(), secret=True)
            wire.send_message(connection, hello, deadline())
            auth = wire.receive_message(connection, wire.AUTH, deadline())
            wire.send_message(connection, wire.Welcome(proof=auth.proof), deadline())
            connection.recv(1)

    impostor = threading.Thread(target=pretend)
    impostor.start()
    info = msgspec.structs.replace(peer.info, tcp_address=f"127.0.0.1:{listener.getsockname()[1]}")
    transport, buffer = TcpTransport(SECRET), bytearray(100)
    results = await transport.read(
        info,
        LeaseId("l"),
        [SliceRead(0, GENERATION, 0, memoryview(buffer))],
        deadline_ns=time.time_ns() + 10_000_000_000,
    )
    await transport.close()
    impostor.join(10)
    listener.close()
    assert results[0].outcome is ReadOutcome.UNREACHABLE
    assert "could not prove" in results[0].detail
    assert buffer == bytes(100)


@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=200))
def test_a_server_that_sends_garbage_is_unreachable_and_named(garbage: bytes) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def babble() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(ConnectionError):
            connection.sendall(garbage)

    babbler = threading.Thread(target=babble)
    babbler.start()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    info = NodeInfo(node=NODE, epoch=1, host="h", arena_path="", slot_bytes=4096, num_slots=1, tcp_address=address)

    async def read() -> tuple[ReadOutcome, str]:
        transport = TcpTransport(SECRET)
        results = await transport.read(
            info,
            LeaseId("l"),
            [SliceRead(0, 1, 0, memoryview(bytearray(9)))],
            deadline_ns=time.time_ns() + 10_000_000_000,
        )
        await transport.close()
        return results[0].outcome, results[0].detail

    outcome, detail = asyncio.run(read())
    babbler.join(10)
    listener.close()
    assert outcome is ReadOutcome.UNREACHABLE
    assert address in detail


def test_closing_a_server_ends_its_connections_and_threads(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    peer = Peer(tmp_path, SECRET)
    with authenticated(peer) as connection:
        assert len(set(threading.enumerate()) - before) == 2
        peer.close()
        assert ends(connection)
    peer.server.close()
    assert set(threading.enumerate()) <= before
