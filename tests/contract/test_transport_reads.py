"""What every transport promises: the right bytes or a typed outcome, per slice, and hands off afterwards."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfmoon.schemas.ids import LeaseId
from halfmoon.transport.protocol import ReadOutcome, SliceRead, Transport
from halfmoon.transport.shm import ShmTransport
from halfmoon.transport.tcp import TcpTransport
from support.pool_peer import (
    GENERATION,
    GOOD_LEASE,
    HOST,
    NUM_SLOTS,
    SLOT_BYTES,
    Peer,
    PeerProcess,
    payload,
)
from support.wait import until

SECRET = "moon"
MAKE: dict[str, Callable[[], Transport]] = {"shm": lambda: ShmTransport(HOST), "tcp": lambda: TcpTransport(SECRET)}


@pytest.fixture(params=["shm", "tcp"])
async def transport(request: pytest.FixtureRequest) -> AsyncIterator[Transport]:
    made = MAKE[request.param]()
    yield made
    await made.close()


@pytest.fixture
async def tcp() -> AsyncIterator[TcpTransport]:
    made = TcpTransport(SECRET)
    yield made
    await made.close()


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    made = Peer(tmp_path_factory.mktemp("arena"), SECRET)
    yield made
    made.close()


def in_seconds(seconds: float) -> int:
    return time.time_ns() + int(seconds * 1e9)


def whole(slot: int, generation: int = GENERATION) -> tuple[SliceRead, bytearray]:
    buffer = bytearray(SLOT_BYTES)
    return SliceRead(slot, generation, 0, memoryview(buffer)), buffer


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ranges=st.lists(
        st.tuples(st.integers(0, NUM_SLOTS - 1), st.integers(0, SLOT_BYTES - 1), st.integers(0, 200_000)), max_size=20
    )
)
def test_bytes_arrive_intact_whatever_the_ranges(peer: Peer, name: str, ranges: list[tuple[int, int, int]]) -> None:
    async def check() -> None:
        transport = MAKE[name]()
        slices, buffers = [], []
        for slot, offset, num_bytes in ranges:
            buffers.append(bytearray(min(num_bytes, SLOT_BYTES - offset)))
            slices.append(SliceRead(slot, GENERATION, offset, memoryview(buffers[-1])))
        results = await transport.read(peer.info, GOOD_LEASE, slices, deadline_ns=in_seconds(20))
        await transport.close()
        assert [result.outcome for result in results] == [ReadOutcome.OK] * len(ranges)
        assert all(result.started_ns <= result.finished_ns for result in results)
        for (slot, offset, _), buffer in zip(ranges, buffers, strict=True):
            assert buffer == payload(slot)[offset : offset + len(buffer)]

    asyncio.run(check())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", ["shm", "tcp"])


async def test_one_stale_slice_does_not_fail_its_batch(transport: Transport, peer: Peer) -> None:
    wanted = [whole(0), whole(1, GENERATION - 1), whole(2), whole(3, GENERATION + 1)]
    results = await transport.read(peer.info, GOOD_LEASE, [each for each, _ in wanted], deadline_ns=in_seconds(20))
    ok, stale = ReadOutcome.OK, ReadOutcome.STALE
    assert [result.outcome for result in results] == [ok, stale, ok, stale]
    assert wanted[0][1] == payload(0)
    assert wanted[2][1] == payload(2)
    assert wanted[1][1] == wanted[3][1] == bytes(SLOT_BYTES)


@pytest.mark.parametrize(
    ("slot", "offset", "num_bytes"), [(NUM_SLOTS, 0, 1), (0, 1, SLOT_BYTES), (0, SLOT_BYTES, 1), (-1, 0, 1), (0, -1, 1)]
)
async def test_a_range_outside_a_slot_is_refused_and_the_next_is_served(
    transport: Transport, peer: Peer, slot: int, offset: int, num_bytes: int
) -> None:
    buffer = bytearray(num_bytes)
    good, good_buffer = whole(4)
    slices = [SliceRead(slot, GENERATION, offset, memoryview(buffer)), good]
    results = await transport.read(peer.info, GOOD_LEASE, slices, deadline_ns=in_seconds(20))
    assert [result.outcome for result in results] == [ReadOutcome.REFUSED, ReadOutcome.OK]
    assert buffer == bytes(num_bytes)
    assert good_buffer == payload(4)


async def test_a_passed_deadline_moves_nothing(transport: Transport, peer: Peer) -> None:
    wanted, buffer = whole(0)
    results = await transport.read(peer.info, GOOD_LEASE, [wanted], deadline_ns=in_seconds(-1))
    assert [result.outcome for result in results] == [ReadOutcome.DEADLINE]
    assert buffer == bytes(SLOT_BYTES)


async def test_a_peer_that_is_not_there_is_unreachable(transport: Transport, tmp_path: Path) -> None:
    gone = Peer(tmp_path, SECRET)
    gone.close()
    wanted, _ = whole(0)
    results = await transport.read(gone.info, GOOD_LEASE, [wanted], deadline_ns=in_seconds(20))
    assert [result.outcome for result in results] == [ReadOutcome.UNREACHABLE]
    assert results[0].detail


async def test_after_a_cancellation_the_destination_is_the_callers(transport: Transport, peer: Peer) -> None:
    buffers = [bytearray(SLOT_BYTES) for _ in range(400)]
    slices = [SliceRead(index % NUM_SLOTS, GENERATION, 0, memoryview(each)) for index, each in enumerate(buffers)]
    for patience in range(1, 6):
        reading = asyncio.create_task(transport.read(peer.info, GOOD_LEASE, slices, deadline_ns=in_seconds(30)))
        for _ in range(patience):
            await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        for buffer in buffers:
            buffer[:] = bytes(SLOT_BYTES)
        # Anything that still wrote would show up while another whole read goes through the same machinery.
        wanted, buffer = whole(5)
        results = await transport.read(peer.info, GOOD_LEASE, [wanted], deadline_ns=in_seconds(30))
        assert results[0].outcome is ReadOutcome.OK
        assert buffer == payload(5)
        assert not any(map(any, (buffer[:4096] for buffer in buffers)))
        assert all(buffer == bytes(SLOT_BYTES) for buffer in buffers[:20])


async def test_close_is_idempotent_and_ends_what_runs(transport: Transport, peer: Peer) -> None:
    wanted = [whole(slot)[0] for slot in range(NUM_SLOTS)]
    reading = asyncio.create_task(transport.read(peer.info, GOOD_LEASE, wanted * 20, deadline_ns=in_seconds(30)))
    await asyncio.sleep(0)
    await transport.close()
    await transport.close()
    results = await reading
    assert len(results) == 20 * NUM_SLOTS
    assert transport.unavailable(peer.info) == "the transport is closed"


async def test_a_restarted_peer_never_passes_for_its_former_self(transport: Transport, tmp_path: Path) -> None:
    first = Peer(tmp_path, SECRET, epoch=1)
    wanted, buffer = whole(0)
    results = await transport.read(first.info, GOOD_LEASE, [wanted], deadline_ns=in_seconds(20))
    assert (results[0].outcome, bytes(buffer)) == (ReadOutcome.OK, payload(0))
    port = int(first.server.address.rpartition(":")[2])
    first.close()
    second = Peer(tmp_path, SECRET, port=port, epoch=2)
    try:
        results = await transport.read(second.info, GOOD_LEASE, [wanted], deadline_ns=in_seconds(20))
        assert (results[0].outcome, bytes(buffer)) == (ReadOutcome.OK, payload(0, epoch=2))
        if transport.name == "tcp":
            old, old_buffer = whole(0)
            results = await transport.read(first.info, GOOD_LEASE, [old], deadline_ns=in_seconds(20))
            assert results[0].outcome is ReadOutcome.STALE
            assert old_buffer == bytes(SLOT_BYTES)
    finally:
        second.close()


async def test_a_slot_that_is_freed_while_it_is_read_is_not_reported_as_good(
    transport: Transport, tmp_path: Path
) -> None:
    peer = Peer(tmp_path, SECRET)
    slices = [whole(1)[0] for _ in range(200)]
    reading = asyncio.create_task(transport.read(peer.info, GOOD_LEASE, slices, deadline_ns=in_seconds(30)))
    await until(lambda: any(slices[3].destination[:64]) or reading.done(), what="some slices are read")
    peer.arena.set_generation(1, GENERATION + 1)
    changed_ns = time.time_ns()
    results = await reading
    assert all(result.outcome is ReadOutcome.STALE for result in results if result.started_ns > changed_ns + 50_000_000)
    assert {result.outcome for result in results} <= {ReadOutcome.OK, ReadOutcome.STALE}
    results = await transport.read(peer.info, GOOD_LEASE, slices[:2], deadline_ns=in_seconds(30))
    assert [result.outcome for result in results] == [ReadOutcome.STALE] * 2
    peer.close()


async def test_tcp_serves_nothing_without_a_live_lease(tcp: TcpTransport, peer: Peer) -> None:
    wanted, buffer = whole(0)
    results = await tcp.read(peer.info, LeaseId("lease-other"), [wanted], deadline_ns=in_seconds(20))
    assert [result.outcome for result in results] == [ReadOutcome.REFUSED]
    assert buffer == bytes(SLOT_BYTES)


@pytest.mark.parametrize(
    ("served", "asked", "reason"),
    [
        ("moon", "sun", "doesn't match"),
        ("moon", None, "expects a cluster_secret"),
        (None, "moon", "has no cluster_secret"),
    ],
)
async def test_tcp_ends_that_do_not_share_a_secret_say_so(
    tmp_path: Path, served: str | None, asked: str | None, reason: str
) -> None:
    peer, transport = Peer(tmp_path, served), TcpTransport(asked)
    wanted, buffer = whole(0)
    results = await transport.read(peer.info, GOOD_LEASE, [wanted], deadline_ns=in_seconds(20))
    await transport.close()
    peer.close()
    assert results[0].outcome is ReadOutcome.UNREACHABLE
    assert reason in results[0].detail
    assert buffer == bytes(SLOT_BYTES)


async def test_tcp_without_any_secret_serves_the_same_machine(tmp_path: Path) -> None:
    peer, transport = Peer(tmp_path, None), TcpTransport(None)
    wanted, buffer = whole(0)
    results = await transport.read(peer.info, GOOD_LEASE, [wanted], deadline_ns=in_seconds(20))
    await transport.close()
    peer.close()
    assert (results[0].outcome, bytes(buffer)) == (ReadOutcome.OK, payload(0))


async def test_tcp_peer_killed_mid_read_ends_the_read(tcp: TcpTransport, tmp_path: Path) -> None:
    peer = PeerProcess(tmp_path, SECRET)
    try:
        wanted = [whole(index % NUM_SLOTS) for index in range(600)]
        slices = [each for each, _ in wanted]
        reading = asyncio.create_task(tcp.read(peer.info, GOOD_LEASE, slices, deadline_ns=in_seconds(30)))
        await until(lambda: any(wanted[20][1][:4096]))
        peer.process.send_signal(signal.SIGKILL)
        results = await asyncio.wait_for(reading, 10)
        outcomes = [result.outcome for result in results]
        num_ok = outcomes.count(ReadOutcome.OK)
        assert num_ok >= 20
        assert outcomes == [ReadOutcome.OK] * num_ok + [ReadOutcome.UNREACHABLE] * (600 - num_ok)
        expected = [payload(slot) for slot in range(NUM_SLOTS)]
        assert all(wanted[index][1] == expected[index % NUM_SLOTS] for index in range(num_ok))
    finally:
        peer.close()


async def test_tcp_peer_that_hangs_is_given_up_at_the_deadline(tcp: TcpTransport, tmp_path: Path) -> None:
    peer = PeerProcess(tmp_path, SECRET)
    try:
        wanted, buffer = whole(0)
        results = await tcp.read(peer.info, GOOD_LEASE, [wanted], deadline_ns=in_seconds(20))
        assert results[0].outcome is ReadOutcome.OK
        peer.freeze()
        before = time.monotonic()
        results = await tcp.read(peer.info, GOOD_LEASE, [wanted, wanted], deadline_ns=in_seconds(0.3))
        assert [result.outcome for result in results] == [ReadOutcome.DEADLINE] * 2
        assert 0.25 < time.monotonic() - before < 5
        reading = asyncio.create_task(tcp.read(peer.info, GOOD_LEASE, [wanted], deadline_ns=in_seconds(30)))
        await until(lambda: tcp.num_connected, what="the read hangs")
        reading.cancel()
        before = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert time.monotonic() - before < 5
        peer.thaw()
        buffer[:] = bytes(SLOT_BYTES)
        results = await tcp.read(peer.info, GOOD_LEASE, [wanted], deadline_ns=in_seconds(20))
        assert (results[0].outcome, bytes(buffer)) == (ReadOutcome.OK, payload(0))
    finally:
        peer.close()
