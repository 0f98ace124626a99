"""Reads between two arenas of this process, over a real device."""

import asyncio
import random
import time
from pathlib import Path

import pytest

from halfmoon.pool.arena import Arena
from halfmoon.schemas.ids import LeaseId
from halfmoon.transport.protocol import ReadOutcome, SliceRead
from halfmoon.transport.rdma.node import RdmaNode
from halfmoon.transport.rdma.reader import RdmaTransport
from support.rdma_peer import (
    GENERATION,
    GOOD_LEASE,
    NODE,
    NUM_SLOTS,
    SECRET,
    SLOT_BYTES,
    DirectControl,
    RdmaPeer,
    payload,
)
from support.wait import until

OK, STALE = ReadOutcome.OK, ReadOutcome.STALE


def in_seconds(seconds: float) -> int:
    return time.time_ns() + int(seconds * 1e9)


def whole(slot: int, generation: int = GENERATION) -> tuple[SliceRead, bytearray]:
    buffer = bytearray(SLOT_BYTES)
    return SliceRead(slot, generation, 0, memoryview(buffer)), buffer


def into(arena: Arena, num_slices: int) -> list[SliceRead]:
    """Many whole slots, into the arena's, over and over."""
    return [SliceRead(each % NUM_SLOTS, GENERATION, 0, arena.slot(each % NUM_SLOTS)) for each in range(num_slices)]


async def test_slots_arrive_in_the_readers_arena(peer: RdmaPeer, transport: RdmaTransport, arena: Arena) -> None:
    reads = [SliceRead(slot, GENERATION, 0, arena.slot(NUM_SLOTS - 1 - slot)) for slot in range(NUM_SLOTS)]
    results = await transport.read(peer.info, GOOD_LEASE, reads, deadline_ns=in_seconds(20))
    assert [(result.outcome, result.detail) for result in results] == [(OK, "")] * NUM_SLOTS
    assert all(0 < result.started_ns <= result.finished_ns for result in results)
    for slot, read in enumerate(reads):
        assert bytes(read.destination) == payload(slot)


async def test_any_ranges_arrive_in_any_memory(peer: RdmaPeer, transport: RdmaTransport) -> None:
    """More than one grant takes, of all sizes from nothing on, into memory that no device knows yet."""
    chance = random.Random(5)
    reads: list[SliceRead] = []
    for _ in range(300):
        offset = chance.randrange(SLOT_BYTES)
        num_bytes = min(chance.choice([0, 1, 7, 4096, 9999]), SLOT_BYTES - offset)
        lead = chance.randrange(8)
        destination = memoryview(bytearray(lead + num_bytes))[lead:]
        reads.append(SliceRead(chance.randrange(NUM_SLOTS), GENERATION, offset, destination))
    results = await transport.read(peer.info, GOOD_LEASE, reads, deadline_ns=in_seconds(30))
    assert [result.outcome for result in results] == [OK] * len(reads)
    for read in reads:
        assert bytes(read.destination) == payload(read.slot)[read.offset : read.offset + len(read.destination)]
    assert await transport.read(peer.info, GOOD_LEASE, [], deadline_ns=in_seconds(20)) == []


async def test_slices_larger_than_one_read_arrive(devices: RdmaNode, tmp_path: Path) -> None:
    slot_bytes = (5 << 20) // 2
    async with RdmaPeer(tmp_path, slot_bytes=slot_bytes, num_slots=2).serving() as peer:
        control = DirectControl({NODE: peer.server})
        transport = RdmaTransport(devices, control, reader="reader", secret=SECRET, num_queue_pairs=3)
        buffer = bytearray(slot_bytes)
        read = SliceRead(1, GENERATION, 0, memoryview(buffer))
        results = await transport.read(peer.info, GOOD_LEASE, [read], deadline_ns=in_seconds(30))
        assert results[0].outcome is OK
        assert buffer == peer.arena.slot(1)
        await transport.close()


async def test_one_stale_slice_does_not_fail_its_batch(peer: RdmaPeer, transport: RdmaTransport) -> None:
    wanted = [whole(0), whole(1, GENERATION - 1), whole(2), whole(3, GENERATION + 1)]
    for peer.trusting in (False, True):  # The server sees it when it is asked; the reader by itself.
        results = await transport.read(peer.info, GOOD_LEASE, [each for each, _ in wanted], deadline_ns=in_seconds(20))
        assert [result.outcome for result in results] == [OK, STALE, OK, STALE]
        assert "generation 7" in results[1].detail or "another generation" in results[1].detail
        assert [bytes(wanted[slot][1]) for slot in (0, 2)] == [payload(0), payload(2)]
        assert wanted[1][1] == wanted[3][1] == bytes(SLOT_BYTES)


async def test_a_slot_that_is_freed_while_it_is_read_is_not_reported_as_good(
    peer: RdmaPeer, transport: RdmaTransport, arena: Arena
) -> None:
    peer.trusting = True
    reads = into(arena, 160)
    reading = asyncio.create_task(transport.read(peer.info, GOOD_LEASE, reads, deadline_ns=in_seconds(40)))
    await until(lambda: any(arena.slot(5)[:64]), what="some slices are read")
    peer.arena.set_generation(5, GENERATION + 1)
    changed_ns = time.time_ns()
    results = await reading
    of_slot = [result for read, result in zip(reads, results, strict=True) if read.slot == 5]
    assert {result.outcome for result in of_slot if result.started_ns > changed_ns} == {STALE}
    assert {result.outcome for result in of_slot if result.finished_ns > changed_ns} == {STALE}
    assert {result.outcome for read, result in zip(reads, results, strict=True) if read.slot != 5} == {OK}


@pytest.mark.parametrize(
    ("slot", "offset", "num_bytes"), [(NUM_SLOTS, 0, 1), (0, 1, SLOT_BYTES), (0, SLOT_BYTES, 1), (-1, 0, 1), (0, -1, 1)]
)
async def test_a_range_outside_a_slot_is_refused_and_the_next_is_served(
    peer: RdmaPeer, transport: RdmaTransport, slot: int, offset: int, num_bytes: int
) -> None:
    buffer = bytearray(num_bytes)
    good, good_buffer = whole(4)
    reads = [SliceRead(slot, GENERATION, offset, memoryview(buffer)), good]
    results = await transport.read(peer.info, GOOD_LEASE, reads, deadline_ns=in_seconds(20))
    assert [result.outcome for result in results] == [ReadOutcome.REFUSED, OK]
    assert buffer == bytes(num_bytes)
    assert good_buffer == payload(4)


async def test_nothing_is_read_without_a_live_lease(peer: RdmaPeer, transport: RdmaTransport) -> None:
    wanted, buffer = whole(0)
    results = await transport.read(peer.info, LeaseId("lease-other"), [wanted], deadline_ns=in_seconds(20))
    assert [result.outcome for result in results] == [ReadOutcome.REFUSED]
    assert "no lease lease-other" in results[0].detail
    assert buffer == bytes(SLOT_BYTES)


async def test_a_passed_deadline_moves_nothing(peer: RdmaPeer, transport: RdmaTransport) -> None:
    wanted, buffer = whole(0)
    results = await transport.read(peer.info, GOOD_LEASE, [wanted], deadline_ns=in_seconds(-1))
    assert [result.outcome for result in results] == [ReadOutcome.DEADLINE]
    assert buffer == bytes(SLOT_BYTES)


async def test_a_deadline_mid_read_ends_it_and_the_destinations_are_the_callers(
    peer: RdmaPeer, transport: RdmaTransport, arena: Arena
) -> None:
    results = await transport.read(peer.info, GOOD_LEASE, into(arena, 2000), deadline_ns=in_seconds(1.5))
    ended_ns = time.time_ns()
    outcomes = [result.outcome for result in results]
    num_ok = outcomes.count(OK)
    assert 0 < num_ok < 2000
    assert outcomes == [OK] * num_ok + [ReadOutcome.DEADLINE] * (2000 - num_ok)
    assert ended_ns - results[0].started_ns < 10e9
    await untouched(peer, transport, arena)


async def test_after_a_cancellation_the_destinations_are_the_callers(
    peer: RdmaPeer, transport: RdmaTransport, arena: Arena
) -> None:
    for _ in range(2):
        reading = asyncio.create_task(
            transport.read(peer.info, GOOD_LEASE, into(arena, 2000), deadline_ns=in_seconds(60))
        )
        await until(lambda: any(arena.slot(3)[:64]), what="the first bytes are there")
        cancelled_s = time.monotonic()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert time.monotonic() - cancelled_s < 5
        await untouched(peer, transport, arena)
    assert peer.server.num_connections == 1, "those that were cut off are gone"


async def untouched(peer: RdmaPeer, transport: RdmaTransport, arena: Arena) -> None:
    """Nothing writes to the arena, though another read goes through the same machinery."""
    for slot in range(NUM_SLOTS):
        arena.slot(slot)[:] = bytes(SLOT_BYTES)
    wanted, buffer = whole(5)
    results = await transport.read(peer.info, GOOD_LEASE, [wanted], deadline_ns=in_seconds(20))
    assert results[0].outcome is OK
    assert buffer == payload(5)
    assert all(arena.slot(slot) == bytes(SLOT_BYTES) for slot in range(NUM_SLOTS))


@pytest.mark.parametrize("verb", ["hello", "connect", "grant"])
async def test_a_cancellation_while_a_peer_is_asked_leaves_nothing_behind(
    peer: RdmaPeer, transport: RdmaTransport, control: DirectControl, verb: str
) -> None:
    wanted, buffer = whole(2)
    arrived = control.hold(verb)
    reading = asyncio.create_task(transport.read(peer.info, GOOD_LEASE, [wanted], deadline_ns=in_seconds(20)))
    await asyncio.wait_for(arrived.wait(), 10)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    control.release(verb)
    results = await transport.read(peer.info, GOOD_LEASE, [wanted], deadline_ns=in_seconds(20))
    assert (results[0].outcome, bytes(buffer)) == (OK, payload(2))
    await until(lambda: peer.server.num_connections == 1, what="only the new connection is there")


async def test_close_ends_what_runs(peer: RdmaPeer, transport: RdmaTransport, arena: Arena) -> None:
    reading = asyncio.create_task(transport.read(peer.info, GOOD_LEASE, into(arena, 2000), deadline_ns=in_seconds(60)))
    await until(lambda: any(arena.slot(0)[:64]), what="the first bytes are there")
    await transport.close()
    await transport.close()
    results = await reading
    assert len(results) == 2000
    assert {result.outcome for result in results} <= {OK, ReadOutcome.DEADLINE}
    assert transport.unavailable(peer.info) == "the transport is closed"
    assert peer.server.num_connections == 0
