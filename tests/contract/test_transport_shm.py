"""What only `shm` promises: mappings outlive their owners, and what those said of leases goes on to hold."""

import time
from pathlib import Path

from halfmoon.schemas.ids import LeaseId
from halfmoon.transport.protocol import ReadOutcome, SliceRead
from halfmoon.transport.shm import ShmTransport
from support.pool_peer import GENERATION, GOOD_LEASE, HOST, NUM_SLOTS, SLOT_BYTES, Peer, PeerProcess, payload
from support.transports import SECRET, in_seconds
from support.wait import until


def whole(slot: int) -> tuple[SliceRead, bytearray]:
    buffer = bytearray(SLOT_BYTES)
    return SliceRead(slot, GENERATION, 0, memoryview(buffer)), buffer


async def test_the_leases_of_a_killed_owner_run_out(tmp_path: Path) -> None:
    """Nobody renews or ends them any more; what was read until then is right."""
    lease_ends_ns = in_seconds(3)
    peer, transport = PeerProcess(tmp_path, SECRET, lease_ends_ns=lease_ends_ns), ShmTransport(HOST)
    wanted = [whole(slot) for slot in range(NUM_SLOTS)]
    slices = [each for each, _ in wanted]
    results = await transport.read(peer.info, GOOD_LEASE, slices, deadline_ns=in_seconds(20))
    assert all(result.outcome is ReadOutcome.OK for result in results if result.finished_ns < lease_ends_ns)
    peer.process.kill()
    peer.process.wait(10)
    while time.time_ns() < lease_ends_ns:
        results = await transport.read(peer.info, GOOD_LEASE, slices, deadline_ns=in_seconds(20))
        for (slice_read, buffer), result in zip(wanted, results, strict=True):
            assert (result.outcome is ReadOutcome.OK) == (result.finished_ns < lease_ends_ns)
            assert result.outcome is not ReadOutcome.OK or buffer == payload(slice_read.slot)
    results = await transport.read(peer.info, GOOD_LEASE, slices, deadline_ns=in_seconds(20))
    assert [result.outcome for result in results] == [ReadOutcome.REFUSED] * NUM_SLOTS
    await transport.close()
    peer.close()


async def test_a_slot_that_no_lease_holds_is_refused_and_so_is_what_lies_behind_its_payload(tmp_path: Path) -> None:
    peer, transport = Peer(tmp_path, SECRET), ShmTransport(HOST)
    peer.arena.tables.set_readable_bytes(2, 0)
    peer.arena.tables.set_readable_bytes(3, SLOT_BYTES - 1)
    slices = [whole(slot)[0] for slot in (2, 3, 4)]
    results = await transport.read(peer.info, GOOD_LEASE, slices, deadline_ns=in_seconds(20))
    assert [result.outcome for result in results] == [ReadOutcome.REFUSED, ReadOutcome.REFUSED, ReadOutcome.OK]
    assert "held by no lease" in results[0].detail
    assert f"holds {SLOT_BYTES - 1} bytes" in results[1].detail
    await transport.close()
    peer.close()


async def test_a_lease_that_the_table_had_no_room_for_is_left_to_another_transport(tmp_path: Path) -> None:
    peer, transport = Peer(tmp_path, SECRET), ShmTransport(HOST)
    tables = peer.arena.tables
    leases = [LeaseId(f"lease-{number}") for number in range(10_000)]
    for lease in leases:
        tables.set_lease(lease, in_seconds(60))
    unlisted = next(lease for lease in leases if tables.lease_expires_ns(lease) is None)
    (result,) = await transport.read(peer.info, unlisted, [whole(0)[0]], deadline_ns=in_seconds(20))
    assert result.outcome is ReadOutcome.UNREACHABLE
    await transport.close()
    peer.close()


async def test_more_arenas_than_may_be_mapped_take_turns(tmp_path: Path) -> None:
    transport = ShmTransport(HOST, max_mapped=2)
    peers = [Peer(tmp_path, SECRET, epoch=epoch) for epoch in range(1, 5)]
    for _ in range(2):
        for epoch, peer in enumerate(peers, 1):
            wanted, buffer = whole(1)
            (result,) = await transport.read(peer.info, GOOD_LEASE, [wanted], deadline_ns=in_seconds(20))
            assert (result.outcome, bytes(buffer)) == (ReadOutcome.OK, payload(1, epoch))
            assert len(transport._arenas) <= 2
    await transport.close()
    await until(lambda: not transport._arenas)
    for peer in peers:
        peer.close()
