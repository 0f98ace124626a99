"""What only `tcp` promises: ends that prove themselves, and peers that die or hang."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from halfmoon.transport.protocol import ReadOutcome, SliceRead
from halfmoon.transport.tcp import TcpTransport
from support.cut import Proxy
from support.pool_peer import GENERATION, GOOD_LEASE, NUM_SLOTS, SLOT_BYTES, Peer, PeerProcess, payload
from support.transports import SECRET, in_seconds
from support.wait import until


@pytest.fixture
async def tcp() -> AsyncIterator[TcpTransport]:
    made = TcpTransport(SECRET)
    yield made
    await made.close()


def whole(slot: int, generation: int = GENERATION) -> tuple[SliceRead, bytearray]:
    buffer = bytearray(SLOT_BYTES)
    return SliceRead(slot, generation, 0, memoryview(buffer)), buffer


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


async def test_tcp_peer_killed_mid_read_ends_the_read(tmp_path: Path) -> None:
    """Over one connection, so that what had come is a beginning of the batch."""
    tcp = TcpTransport(SECRET, max_lanes=1)
    peer = PeerProcess(tmp_path, SECRET)
    try:
        wanted = [whole(index % NUM_SLOTS) for index in range(600)]
        slices = [each for each, _ in wanted]
        reading = asyncio.create_task(tcp.read(peer.info, GOOD_LEASE, slices, deadline_ns=in_seconds(30)))
        await until(lambda: any(wanted[40][1][:4096]), what="the second group is on its way")
        peer.process.send_signal(signal.SIGKILL)
        results = await asyncio.wait_for(reading, 10)
        outcomes = [result.outcome for result in results]
        num_ok = outcomes.count(ReadOutcome.OK)
        assert num_ok % 32 == 0
        assert outcomes == [ReadOutcome.OK] * num_ok + [ReadOutcome.UNREACHABLE] * (600 - num_ok)
        expected = [payload(slot) for slot in range(NUM_SLOTS)]
        assert all(wanted[index][1] == expected[index % NUM_SLOTS] for index in range(num_ok))
    finally:
        peer.close()
        await tcp.close()


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


async def test_a_network_that_drops_mid_slice_ends_the_read_at_once(tcp: TcpTransport, tmp_path: Path) -> None:
    peer = Peer(tmp_path, SECRET)
    _, _, port = peer.server.address.rpartition(":")
    async with Proxy("127.0.0.2", "127.0.0.1", int(port)) as proxy:
        proxy.cut_after(2 * SLOT_BYTES, drop=True)
        info = msgspec.structs.replace(peer.info, tcp_address=f"127.0.0.2:{port}")
        wanted = [whole(slot) for slot in range(NUM_SLOTS)]
        results = await tcp.read(info, GOOD_LEASE, [each for each, _ in wanted], deadline_ns=in_seconds(30))
        # Bytes whose second status never came are not handed on, though they may have arrived.
        assert {result.outcome for result in results} == {ReadOutcome.UNREACHABLE}
        proxy.mend()
        results = await tcp.read(info, GOOD_LEASE, [each for each, _ in wanted], deadline_ns=in_seconds(30))
        assert [result.outcome for result in results] == [ReadOutcome.OK] * NUM_SLOTS
        assert all(buffer == payload(slot) for slot, (_, buffer) in enumerate(wanted))
    await asyncio.to_thread(peer.close)


@pytest.mark.parametrize("num_lanes", [2, 3])
async def test_a_batch_over_several_connections_arrives_as_over_one(tmp_path: Path, num_lanes: int) -> None:
    peer, transport = Peer(tmp_path, SECRET), TcpTransport(SECRET, max_lanes=num_lanes)
    wanted = [whole(index % NUM_SLOTS, GENERATION + (index == 40)) for index in range(64)]
    for _ in range(2):
        results = await transport.read(peer.info, GOOD_LEASE, [each for each, _ in wanted], deadline_ns=in_seconds(30))
        assert [index for index, result in enumerate(results) if result.outcome is not ReadOutcome.OK] == [40]
        assert all(buffer == payload(index % NUM_SLOTS) for index, (_, buffer) in enumerate(wanted) if index != 40)
    assert len(peer.server._connections) == num_lanes
    await transport.close()
    await asyncio.to_thread(peer.close)
