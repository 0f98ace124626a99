"""The framing of `tcp` under fuzz, both ways: a hostile client to the server, a hostile server to the reader.

500 cases each by default; HALFMOON_FUZZ_CASES sets another number (`make fuzz` runs 100,000).
"""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfmoon.pool.arena import Arena
from halfmoon.schemas.ids import LeaseId, NodeId
from halfmoon.transport import tcp_wire as wire
from halfmoon.transport.protocol import ReadOutcome, SliceRead, SliceResult
from halfmoon.transport.tcp import _read_batch
from halfmoon.transport.tcp_server import TcpServer
from halfmoon.transport.tcp_stream import Deadline, WireError, receive_exactly

NUM_CASES = int(os.environ.get("HALFMOON_FUZZ_CASES", "500"))
SLOT_BYTES, NUM_SLOTS, HELD = 4096, 4, (0, 2)
LEASE = LeaseId("lease-good")
SECRET_BYTE, PUBLIC_BYTE = 0xEE, 0x11
FUZZ = settings(
    max_examples=NUM_CASES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

pytestmark = pytest.mark.timeout(300 if NUM_CASES <= 2000 else 0)

INTEGERS = st.one_of(
    st.integers(-2, NUM_SLOTS + 1), st.integers(0, SLOT_BYTES + 1), st.sampled_from([-(2**63), 2**31, 2**63 - 1])
)
SLICES = st.builds(wire.WireSlice, slot=INTEGERS, generation=st.integers(-1, 1), offset=INTEGERS, num_bytes=INTEGERS)
REQUESTS = st.builds(
    wire.ReadRequest, lease_id=st.sampled_from([LEASE, LeaseId("x")]), slices=st.lists(SLICES, max_size=12).map(tuple)
)


def authorize(lease: LeaseId, slot: int, generation: int, end: int) -> tuple[ReadOutcome, str] | None:
    if generation != 0:
        return ReadOutcome.STALE, "another generation"
    return None if lease == LEASE and slot in HELD else (ReadOutcome.REFUSED, "not held" * 100)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TcpServer]:
    arena = Arena.create(tmp_path_factory.mktemp("arena") / "a", SLOT_BYTES, NUM_SLOTS)
    for slot in range(NUM_SLOTS):
        arena.slot(slot)[:] = bytes([PUBLIC_BYTE if slot in HELD else SECRET_BYTE]) * SLOT_BYTES
    made = TcpServer(arena, NodeId("peer"), 1, authorize, secret=None)
    made.start()
    yield made
    made.close()
    arena.close()


@contextlib.contextmanager
def connected(server: TcpServer) -> Iterator[socket.socket]:
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.settimeout(None)
        wire.receive_message(connection, wire.HELLO, Deadline(10))
        yield connection


def everything_from(connection: socket.socket) -> bytes:
    """Until the server hangs up."""
    received = bytearray()
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            received += part
    return bytes(received)


def damaged(data: bytes, damage: list[tuple[float, int]], cut: float) -> bytes:
    """Some bytes changed, and the end cut off."""
    changed = bytearray(data)
    for place, mask in damage if data else ():
        changed[int(place * (len(changed) - 1))] ^= mask
    return bytes(changed[: int(cut * len(changed))])


DAMAGE = st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), max_size=3)
CUTS = st.one_of(st.just(1.0), st.floats(0, 1))
NOISE = st.one_of(
    st.binary(max_size=100),
    st.builds(lambda length, rest: struct.pack(">I", length) + rest, st.integers(0, 2**32 - 1), st.binary(max_size=60)),
)


@FUZZ
@given(requests=st.lists(REQUESTS, max_size=2), noise=NOISE, damage=DAMAGE, cut=CUTS, proven=st.booleans())
def test_a_hostile_client_gets_nothing_that_it_does_not_hold(
    server: TcpServer,
    requests: list[wire.ReadRequest],
    noise: bytes,
    damage: list[tuple[float, int]],
    cut: float,
    proven: bool,
) -> None:
    hello = wire.frame(wire.Auth(nonce=bytes(wire.NONCE_BYTES)))
    stream = damaged(b"".join(wire.frame(each) for each in requests) + noise, damage, cut)
    with connected(server) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(hello + stream if proven else damaged(hello, damage, cut) + stream)
            connection.shutdown(socket.SHUT_WR)
        answer = everything_from(connection)
    # Statuses, lengths and reasons are ASCII or small: a run of this byte could only be a slot's that isn't held.
    assert bytes([SECRET_BYTE]) * 4 not in answer
    assert len(answer) <= 4096 + 2 * 12 * (SLOT_BYTES + 2 + wire.MAX_REASON_BYTES + 8)


@FUZZ
@given(request=REQUESTS)
def test_any_request_is_answered_slice_by_slice_and_the_connection_goes_on(
    server: TcpServer, request: wire.ReadRequest
) -> None:
    def expected(each: wire.WireSlice) -> wire.Status:
        inside = 0 <= each.slot < NUM_SLOTS and each.offset >= 0 and each.num_bytes >= 0
        if not inside or each.offset + each.num_bytes > SLOT_BYTES:
            return wire.Status.REFUSED
        if each.generation != 0:
            return wire.Status.STALE
        return wire.Status.OK if request.lease_id == LEASE and each.slot in HELD else wire.Status.REFUSED

    with connected(server) as connection:
        wire.send_message(connection, wire.Auth(nonce=bytes(wire.NONCE_BYTES)), Deadline(10))
        wire.receive_message(connection, wire.WELCOME, Deadline(10))
        for _ in range(2):
            wire.send_message(connection, request, Deadline(10))
            num_failed = 0
            for group in wire.groups([each.num_bytes for each in request.slices]):
                wanted = [request.slices[position] for position in group]
                statuses = wire.statuses(receive_exactly(connection, len(group), Deadline(10)))
                assert statuses == [expected(each) for each in wanted]
                sent = [each for each, status in zip(wanted, statuses, strict=True) if status is wire.Status.OK]
                for each in sent:
                    payload = receive_exactly(connection, each.num_bytes, Deadline(10))
                    assert payload == bytes([PUBLIC_BYTE]) * each.num_bytes
                assert receive_exactly(connection, len(sent), Deadline(10)) == bytes(len(sent))
                num_failed += len(wanted) - len(sent)
            if num_failed:
                told = wire.receive_message(connection, wire.REASONS, Deadline(10), wire.MAX_FRAME_BYTES)
                assert len(told.reasons) == num_failed


@pytest.fixture(scope="module")
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


GUARD = 64


@FUZZ
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    codes=st.lists(st.sampled_from([0, 0, 0, 1, 2, 3, 255]), min_size=12, max_size=12),
    reasons=st.lists(st.text(max_size=20), max_size=6),
    noise=NOISE,
    damage=DAMAGE,
    cut=CUTS,
)
def test_a_hostile_server_can_not_write_outside_the_destinations_or_pass_for_right(
    listener: socket.socket,
    sizes: list[int],
    codes: list[int],
    reasons: list[str],
    noise: bytes,
    damage: list[tuple[float, int]],
    cut: float,
) -> None:
    """It answers nearly by the rules: each slice has a status before, bytes where that is ok, and a status after."""
    before = codes[: len(sizes)]
    after = [code for code, first in zip(codes[6:], before, strict=False) if first == 0]
    payload = b"".join(bytes([PUBLIC_BYTE]) * size for size, first in zip(sizes, before, strict=True) if first == 0)
    told = wire.frame(wire.Reasons(reasons=tuple(reasons))) if reasons else b""
    stream = damaged(bytes(before) + payload + bytes(after) + told + noise, damage, cut)
    memory = bytearray(b"\xaa" * (sum(sizes) + GUARD * (len(sizes) + 1)))
    slices, guards, place = [], [range(GUARD)], GUARD
    for size in sizes:
        slices.append(SliceRead(0, 0, 0, memoryview(memory)[place : place + size]))
        guards.append(range(place + size, place + size + GUARD))
        place += size + GUARD
    results: list[SliceResult] = []
    with socket.create_connection(listener.getsockname()) as reader:
        peer, _ = listener.accept()
        with peer:
            peer.sendall(stream)
            peer.shutdown(socket.SHUT_WR)
            with contextlib.suppress(WireError, OSError):
                _read_batch(reader, Deadline(10), LEASE, slices, results)
    assert all(memory[place] == 0xAA for guard in guards for place in guard)
    assert len(results) in (0, len(sizes))
    for result, first in zip(results, stream, strict=False):
        # What counts is what came over the wire, damage and all.
        assert result.outcome is not ReadOutcome.OK or first == wire.Status.OK


@FUZZ
@given(st.binary(max_size=400))
def test_no_decoder_is_upset_by_bytes(data: bytes) -> None:
    for decoder in (wire.HELLO, wire.AUTH, wire.WELCOME, wire.READ_REQUEST, wire.REASONS):
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            decoder.decode(data)


@pytest.mark.parametrize("depth", [1_000, 100_000])
def test_a_frame_that_is_nested_deep_is_hung_up_on(server: TcpServer, depth: int) -> None:
    with connected(server) as connection:
        wire.send_message(connection, wire.Auth(nonce=bytes(wire.NONCE_BYTES)), Deadline(10))
        wire.receive_message(connection, wire.WELCOME, Deadline(10))
        nested = b"\x91" * depth
        connection.sendall(struct.pack(">I", len(nested)) + nested)
        connection.shutdown(socket.SHUT_WR)
        assert everything_from(connection) == b""


def test_the_server_has_outlived_it_all(server: TcpServer, tmp_path: Path) -> None:
    one = wire.WireSlice(slot=0, generation=0, offset=5, num_bytes=7)
    with connected(server) as connection:
        wire.send_message(connection, wire.Auth(nonce=bytes(wire.NONCE_BYTES)), Deadline(10))
        wire.receive_message(connection, wire.WELCOME, Deadline(10))
        wire.send_message(connection, wire.ReadRequest(lease_id=LEASE, slices=(one,)), Deadline(10))
        assert receive_exactly(connection, 9, Deadline(10)) == b"\0" + bytes([PUBLIC_BYTE]) * 7 + b"\0"
    assert sum(thread.name == "tcp-serve" for thread in threading.enumerate()) <= 2
