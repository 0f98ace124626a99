"""Which path is taken: real transports, whose other ends die, hang and vanish."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from halfmoon.schemas.kv_tier import NodeInfo
from halfmoon.transport.choice import Paths
from halfmoon.transport.health import Backoff, HealthTable
from halfmoon.transport.protocol import ReadOutcome, SliceRead
from halfmoon.transport.shm import ShmTransport
from halfmoon.transport.tcp import TcpTransport
from support.pool_peer import GENERATION, GOOD_LEASE, HOST, NUM_SLOTS, SLOT_BYTES, Peer, PeerProcess, payload

OK, UNREACHABLE = ReadOutcome.OK, ReadOutcome.UNREACHABLE
S = 1_000_000_000


class Clock:
    """The real time, and as much as a test adds."""

    def __init__(self) -> None:
        self.added_ns = 0

    def __call__(self) -> int:
        return time.time_ns() + self.added_ns


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    made = Peer(tmp_path, None)
    yield made
    made.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def paths(clock: Clock) -> AsyncIterator[Paths]:
    made = Paths(
        [ShmTransport(HOST), TcpTransport(None)],
        health=HealthTable(Backoff(first_s=10.0, max_s=60.0)),
        clock_ns=clock,
        jitter=lambda: 0.0,
    )
    yield made
    await made.close()


async def read(paths: Paths, info: NodeInfo, *slots: int, within_s: float = 20.0) -> list[tuple[ReadOutcome, str]]:
    """Read whole slots; bytes that are said to have come are the right ones."""
    buffers = [bytearray(SLOT_BYTES) for _ in slots]
    slices = [SliceRead(slot, GENERATION, 0, memoryview(buffer)) for slot, buffer in zip(slots, buffers, strict=True)]
    results = await paths.read(info, GOOD_LEASE, slices, deadline_ns=time.time_ns() + int(within_s * S))
    for slot, buffer, (result, _) in zip(slots, buffers, results, strict=True):
        assert result.outcome is not OK or bytes(buffer) == payload(slot, info.epoch)
    return [(result.outcome, name) for result, name in results]


def usable(paths: Paths, info: NodeInfo) -> list[str]:
    return [each.name for each in paths.choose(info).usable]


async def test_the_best_that_both_ends_offer_comes_first(paths: Paths, peer: Peer) -> None:
    assert usable(paths, peer.info) == ["shm", "tcp"]
    far = msgspec.structs.replace(peer.info, host="host-b")
    assert usable(paths, far) == ["tcp"]
    assert "host-b" in paths.choose(far).reasons["shm"]
    closed = msgspec.structs.replace(far, tcp_address=None)
    assert usable(paths, closed) == []
    assert set(paths.choose(closed).reasons) == {"shm", "tcp"}
    assert await read(paths, closed, 0) == [(UNREACHABLE, "")]
    assert await read(paths, peer.info, 0, 1) == [(OK, "shm")] * 2


async def test_an_arena_that_can_not_be_mapped_is_set_aside_and_the_rest_of_the_batch_goes_over_tcp(
    paths: Paths, peer: Peer, clock: Clock
) -> None:
    wrong = msgspec.structs.replace(peer.info, num_slots=NUM_SLOTS + 1)
    assert await read(paths, wrong, 0, 2) == [(OK, "tcp")] * 2
    assert usable(paths, wrong) == ["tcp"]
    assert "set aside" in paths.choose(wrong).reasons["shm"]
    clock.added_ns = 11 * S
    assert usable(paths, wrong) == ["shm", "tcp"]
    assert await read(paths, wrong, 1) == [(OK, "tcp")]
    assert "failure 2 in a row" in paths.choose(wrong).reasons["shm"]
    clock.added_ns += 21 * S
    assert await read(paths, peer.info, 1) == [(OK, "shm")], "after the second pause it is tried, and works"
    found = paths.health()[peer.info.node, "shm"]
    assert (found.num_failures, found.num_set_asides, found.failures_in_a_row) == (2, 2, 0)
    assert paths.health()[peer.info.node, "tcp"].num_bytes == 3 * SLOT_BYTES


async def test_an_arena_that_vanishes_leaves_tcp(paths: Paths, peer: Peer) -> None:
    peer.arena.unlink()
    assert await read(paths, peer.info, 3) == [(OK, "tcp")]
    assert "no arena" in paths.choose(peer.info).reasons["shm"]


async def test_a_tcp_server_that_dies_is_set_aside_and_found_again(clock: Clock, paths: Paths, tmp_path: Path) -> None:
    process = PeerProcess(tmp_path, None)
    far = msgspec.structs.replace(process.info, host="host-b")
    port = int((far.tcp_address or "").rpartition(":")[2])
    try:
        assert await read(paths, far, 0) == [(OK, "tcp")]
        process.process.send_signal(signal.SIGKILL)
        process.process.wait(10)
        assert await read(paths, far, 0) == [(UNREACHABLE, "tcp")]
        assert await read(paths, far, 0) == [(UNREACHABLE, "")], "nobody asks it while it is set aside"
        assert paths.health()[far.node, "tcp"].num_failures == 1
    finally:
        process.close()
    process = PeerProcess(tmp_path, None, port=port)
    try:
        assert await read(paths, far, 0) == [(UNREACHABLE, "")]
        clock.added_ns = 11 * S
        assert await read(paths, far, 0, 1) == [(OK, "tcp")] * 2
        assert await read(paths, far, 0) == [(OK, "tcp")]
    finally:
        process.close()


async def test_a_restarted_peer_is_tried_at_once(paths: Paths, tmp_path: Path) -> None:
    process = PeerProcess(tmp_path, None)
    process.close()
    far = msgspec.structs.replace(process.info, host="host-b")
    assert await read(paths, far, 0) == [(UNREACHABLE, "tcp")]
    again = PeerProcess(tmp_path, None, epoch=2)
    try:
        assert await read(paths, msgspec.structs.replace(again.info, host="host-b"), 0) == [(OK, "tcp")]
    finally:
        again.close()


async def test_what_hangs_gets_half_of_the_time_and_the_next_path_the_rest(tmp_path: Path) -> None:
    process = PeerProcess(tmp_path, None)
    tcp, shm = TcpTransport(None), ShmTransport(HOST)
    paths = Paths([tcp, shm], jitter=lambda: 0.0)  # the other way round: of the two only tcp can hang
    try:
        process.freeze()
        for _ in range(2):
            before = time.monotonic()
            assert await read(paths, process.info, 0, 1, within_s=2.0) == [(OK, "shm")] * 2
            assert 0.9 < time.monotonic() - before < 2.0
        assert usable(paths, process.info) == ["shm"], "two deadlines are a failure"
        process.thaw()
    finally:
        process.close()
        await paths.close()


async def test_answers_are_no_failures_of_the_path(paths: Paths, peer: Peer) -> None:
    far = msgspec.structs.replace(peer.info, host="host-b")
    buffer = memoryview(bytearray(SLOT_BYTES))
    stale, beyond = SliceRead(0, GENERATION + 1, 0, buffer), SliceRead(NUM_SLOTS + 5, GENERATION, 0, buffer)
    deadline_ns = time.time_ns() + 20 * S
    results = await paths.read(far, GOOD_LEASE, [stale, beyond], deadline_ns=deadline_ns)
    assert [result.outcome for result, _ in results] == [ReadOutcome.STALE, ReadOutcome.REFUSED]
    assert usable(paths, far) == ["tcp"]
    assert paths.health()[far.node, "tcp"].num_failures == 0


async def test_a_cancelled_read_tells_nothing(tmp_path: Path) -> None:
    process = PeerProcess(tmp_path, None)
    paths = Paths([TcpTransport(None)])
    try:
        process.freeze()
        reading = asyncio.create_task(read(paths, process.info, 0))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        process.thaw()
        assert paths.health()[process.info.node, "tcp"].num_failures == 0
        assert await read(paths, process.info, 0) == [(OK, "tcp")]
    finally:
        process.close()
        await paths.close()
