"""What every transport promises: the right bytes or a typed outcome, per slice, and hands off afterwards."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfmoon.schemas.ids import LeaseId
from halfmoon.transport.protocol import ReadOutcome, SliceRead, Transport
from support.pool_peer import GENERATION, GOOD_LEASE
from support.transports import Ground, Served, ground_of, in_seconds, whole
from support.wait import until

OK, STALE, REFUSED = ReadOutcome.OK, ReadOutcome.STALE, ReadOutcome.REFUSED


@pytest.fixture(params=["shm", "tcp", "rdma"])
def ground(request: pytest.FixtureRequest, tmp_path: Path) -> Ground:
    made = ground_of(str(request.param), tmp_path)
    if (reason := made.missing()) is not None:
        pytest.skip(reason)
    return made


@pytest.fixture
async def transport(ground: Ground) -> AsyncIterator[Transport]:
    async with ground.transport() as made:
        yield made


@pytest.fixture
async def peer(ground: Ground, tmp_path: Path) -> AsyncIterator[Served]:
    async with ground.peer(tmp_path) as made:
        yield made


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ranges=st.lists(st.tuples(st.integers(0, 7), st.floats(0, 1), st.integers(0, 200_000)), max_size=20))
def test_bytes_arrive_intact_whatever_the_ranges(
    ground: Ground, tmp_path: Path, ranges: list[tuple[int, float, int]]
) -> None:
    async def check() -> None:
        slices = []
        for slot, start, num_bytes in ranges:
            offset = int(start * ground.slot_bytes)
            destination = memoryview(bytearray(min(num_bytes, ground.slot_bytes - offset)))
            slices.append(SliceRead(slot, GENERATION, offset, destination))
        async with ground.peer(tmp_path) as peer, ground.transport() as transport:
            results = await transport.read(peer.info, GOOD_LEASE, slices, deadline_ns=in_seconds(20))
        assert [result.outcome for result in results] == [OK] * len(ranges)
        assert all(result.started_ns <= result.finished_ns for result in results)
        for each in slices:
            assert each.destination == ground.payload(each.slot)[each.offset :][: len(each.destination)]

    asyncio.run(check())


async def test_more_slices_than_one_request_takes_arrive_in_order(
    ground: Ground, transport: Transport, peer: Served
) -> None:
    """Over tcp, two requests of up to 4,096 slices, each in groups; some of them stale, with their own reasons."""
    slices = [
        SliceRead(
            index % ground.num_slots, GENERATION + (index % 1000 == 7), index % 100, memoryview(bytearray(index % 50))
        )
        for index in range(5000)
    ]
    results = await transport.read(peer.info, GOOD_LEASE, slices, deadline_ns=in_seconds(40))
    assert [index for index, result in enumerate(results) if result.outcome is STALE] == [7, 1007, 2007, 3007, 4007]
    assert all(result.detail for result in results if result.outcome is STALE)
    assert [result.outcome for result in results].count(OK) == 4995
    for each, result in zip(slices, results, strict=True):
        if result.outcome is OK:
            assert each.destination == ground.payload(each.slot)[each.offset :][: len(each.destination)]


async def test_one_stale_slice_does_not_fail_its_batch(ground: Ground, transport: Transport, peer: Served) -> None:
    wanted = [whole(ground, slot, generation) for slot, generation in enumerate([7, 6, 7, 8])]
    results = await transport.read(peer.info, GOOD_LEASE, [each for each, _ in wanted], deadline_ns=in_seconds(20))
    assert [result.outcome for result in results] == [OK, STALE, OK, STALE]
    assert wanted[0][1] == ground.payload(0)
    assert wanted[2][1] == ground.payload(2)
    assert wanted[1][1] == wanted[3][1] == bytes(ground.slot_bytes)


@pytest.mark.parametrize(
    ("slot", "offset", "num_bytes"),
    [("end", 0, 1), (0, 1, "all"), (0, "all", 1), (-1, 0, 1), (0, -1, 1), (2**40, 0, 1), (0, 2**62, 1)],
)
async def test_a_range_outside_a_slot_is_refused_and_the_next_is_served(
    ground: Ground, transport: Transport, peer: Served, slot: int | str, offset: int | str, num_bytes: int | str
) -> None:
    named = {"end": ground.num_slots, "all": ground.slot_bytes}
    slot, offset, num_bytes = (named[each] if isinstance(each, str) else each for each in (slot, offset, num_bytes))
    buffer = bytearray(num_bytes)
    good, good_buffer = whole(ground, 4)
    slices = [SliceRead(slot, GENERATION, offset, memoryview(buffer)), good]
    results = await transport.read(peer.info, GOOD_LEASE, slices, deadline_ns=in_seconds(20))
    assert [result.outcome for result in results] == [REFUSED, OK]
    assert buffer == bytes(num_bytes)
    assert good_buffer == ground.payload(4)


async def test_nothing_is_read_without_a_live_lease(ground: Ground, transport: Transport, peer: Served) -> None:
    wanted, buffer = whole(ground, 0)
    results = await transport.read(peer.info, LeaseId("lease-other"), [wanted], deadline_ns=in_seconds(20))
    assert [result.outcome for result in results] == [REFUSED]
    assert "lease-other" in results[0].detail
    assert buffer == bytes(ground.slot_bytes)
    peer.end_lease(GOOD_LEASE)
    results = await transport.read(peer.info, GOOD_LEASE, [wanted], deadline_ns=in_seconds(20))
    assert [result.outcome for result in results] == [REFUSED]
    assert buffer == bytes(ground.slot_bytes)


async def test_a_read_slower_than_its_lease_gets_an_error(
    ground: Ground, transport: Transport, peer: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, _ = whole(ground, 3)
    async with ground.stalling(peer, 100_000, monkeypatch) as (info, stall):
        reading = asyncio.create_task(transport.read(info, GOOD_LEASE, [wanted] * 12, deadline_ns=in_seconds(30)))
        await stall.arrived()
        peer.end_lease(GOOD_LEASE)
        stall.release()
        results = await reading
    assert {result.outcome for result in results} == {REFUSED}
    assert all(str(GOOD_LEASE) in result.detail for result in results)


async def test_a_slot_that_is_freed_and_filled_while_it_is_read_is_stale(
    ground: Ground, transport: Transport, peer: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    (late, _), (good, good_buffer) = whole(ground, 3), whole(ground, 4)
    async with ground.stalling(peer, 100_000, monkeypatch) as (info, stall):
        reading = asyncio.create_task(
            transport.read(info, GOOD_LEASE, [late] * 12 + [good], deadline_ns=in_seconds(30))
        )
        await stall.arrived()
        peer.overwrite(3)
        stall.release()
        results = await reading
    assert [result.outcome for result in results] == [STALE] * 12 + [OK]
    assert good_buffer == ground.payload(4)


async def test_cancelled_mid_slice_the_destination_is_the_callers_only_when_nothing_writes_to_it(
    ground: Ground, transport: Transport, peer: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled, buffer = whole(ground, 3)
    async with ground.stalling(peer, 100_000, monkeypatch) as (info, stall):
        reading = asyncio.create_task(transport.read(info, GOOD_LEASE, [stalled], deadline_ns=in_seconds(30)))
        await stall.arrived()
        cancelled_s = time.monotonic()
        reading.cancel()
        if not ground.can_abandon:
            for _ in range(3):  # Also one that is cancelled again waits.
                await asyncio.wait([reading], timeout=0.02)
                assert not reading.done()
                reading.cancel()
            stall.release()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert time.monotonic() - cancelled_s < 5
        buffer[:] = bytes(ground.slot_bytes)
        stall.release()
        other, other_buffer = whole(ground, 5)
        results = await transport.read(info, GOOD_LEASE, [other], deadline_ns=in_seconds(30))
        assert (results[0].outcome, bytes(other_buffer)) == (OK, ground.payload(5))
    assert buffer == bytes(ground.slot_bytes)


async def test_a_deadline_mid_slice_ends_the_read_and_the_destination_is_the_callers(
    ground: Ground, transport: Transport, peer: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ground.can_abandon:
        pytest.skip("a copy of one slice is never given up half done: the deadline is looked at before each")
    stalled, buffer = whole(ground, 3)
    async with ground.stalling(peer, 100_000, monkeypatch) as (info, stall):
        before = time.monotonic()
        results = await transport.read(info, GOOD_LEASE, [stalled] * 3, deadline_ns=in_seconds(0.5))
        assert [result.outcome for result in results] == [ReadOutcome.DEADLINE] * 3
        assert 0.4 < time.monotonic() - before < 5
        buffer[:] = bytes(ground.slot_bytes)
        stall.release()
        other, other_buffer = whole(ground, 5)
        results = await transport.read(info, GOOD_LEASE, [other], deadline_ns=in_seconds(30))
        assert (results[0].outcome, bytes(other_buffer)) == (OK, ground.payload(5))
    assert buffer == bytes(ground.slot_bytes)


async def test_a_passed_deadline_moves_nothing(ground: Ground, transport: Transport, peer: Served) -> None:
    wanted, buffer = whole(ground, 0)
    results = await transport.read(peer.info, GOOD_LEASE, [wanted], deadline_ns=in_seconds(-1))
    assert [result.outcome for result in results] == [ReadOutcome.DEADLINE]
    assert buffer == bytes(ground.slot_bytes)


async def test_a_peer_that_is_not_there_is_unreachable(ground: Ground, transport: Transport, tmp_path: Path) -> None:
    async with ground.peer(tmp_path) as gone:
        pass
    wanted, _ = whole(ground, 0)
    results = await transport.read(gone.info, GOOD_LEASE, [wanted], deadline_ns=in_seconds(20))
    assert [result.outcome for result in results] == [ReadOutcome.UNREACHABLE]
    assert results[0].detail


async def test_readers_at_once_each_get_their_own_bytes(ground: Ground, transport: Transport, peer: Served) -> None:
    async def one(first: int) -> None:
        wanted = [whole(ground, (first + index) % ground.num_slots) for index in range(ground.num_slots)]
        slices = [each for each, _ in wanted]
        results = await transport.read(peer.info, GOOD_LEASE, slices, deadline_ns=in_seconds(40))
        assert [result.outcome for result in results] == [OK] * len(wanted)
        assert all(buffer == ground.payload(each.slot) for each, buffer in wanted)

    async with asyncio.TaskGroup() as group:
        for reader in range(20):
            group.create_task(one(reader))


async def test_cancelled_at_any_moment_nothing_is_left_behind(
    ground: Ground, transport: Transport, peer: Served
) -> None:
    wanted = [whole(ground, index % ground.num_slots) for index in range(100)]
    for patience in range(1, 6):
        slices = [each for each, _ in wanted]
        reading = asyncio.create_task(transport.read(peer.info, GOOD_LEASE, slices, deadline_ns=in_seconds(30)))
        for _ in range(patience):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        with pytest.raises(asyncio.CancelledError):
            await reading
        for _, buffer in wanted:
            buffer[:] = bytes(ground.slot_bytes)
        # Anything that still wrote would show up while another read goes through the same machinery.
        other, other_buffer = whole(ground, 5)
        results = await transport.read(peer.info, GOOD_LEASE, [other], deadline_ns=in_seconds(30))
        assert (results[0].outcome, bytes(other_buffer)) == (OK, ground.payload(5))
        assert not any(any(buffer) for _, buffer in wanted[:20])


async def test_close_is_idempotent_and_ends_what_runs(ground: Ground, transport: Transport, peer: Served) -> None:
    wanted = [whole(ground, slot)[0] for slot in range(ground.num_slots)]
    reading = asyncio.create_task(transport.read(peer.info, GOOD_LEASE, wanted * 20, deadline_ns=in_seconds(30)))
    await asyncio.sleep(0)
    await transport.close()
    await transport.close()
    results = await reading
    assert len(results) == 20 * ground.num_slots
    assert transport.unavailable(peer.info) == "the transport is closed"


async def test_a_restarted_peer_never_passes_for_its_former_self(
    ground: Ground, transport: Transport, tmp_path: Path
) -> None:
    wanted, buffer = whole(ground, 0)
    async with ground.peer(tmp_path, epoch=1) as first:
        results = await transport.read(first.info, GOOD_LEASE, [wanted], deadline_ns=in_seconds(20))
        assert (results[0].outcome, bytes(buffer)) == (OK, ground.payload(0))
    port = int((first.info.tcp_address or ":0").rpartition(":")[2])
    async with ground.peer(tmp_path, epoch=2, port=port) as second:
        # A mapping of the first life's arena outlives it. Its owner let no lease go: so what is read is its bytes.
        old, old_buffer = whole(ground, 0)
        results = await transport.read(first.info, GOOD_LEASE, [old], deadline_ns=in_seconds(20))
        if ground.name == "shm":
            assert (results[0].outcome, bytes(old_buffer)) == (OK, ground.payload(0))
        else:
            assert results[0].outcome in (STALE, ReadOutcome.UNREACHABLE)
            assert old_buffer == bytes(ground.slot_bytes)
        results = await transport.read(second.info, GOOD_LEASE, [wanted], deadline_ns=in_seconds(20))
        assert (results[0].outcome, bytes(buffer)) == (OK, ground.payload(0, epoch=2))


async def test_a_slot_that_is_freed_during_a_batch_is_not_reported_as_good(
    ground: Ground, transport: Transport, peer: Served
) -> None:
    slices = [whole(ground, 1)[0] for _ in range(120)]
    reading = asyncio.create_task(transport.read(peer.info, GOOD_LEASE, slices, deadline_ns=in_seconds(30)))
    await until(lambda: any(slices[3].destination[:64]) or reading.done(), what="some slices are read")
    peer.overwrite(1)
    results = await reading
    # Over rdma the peer takes the memory window back when it notices, and the device refuses a READ that is under way.
    assert {result.outcome for result in results} <= {OK, STALE, *([REFUSED] if transport.name == "rdma" else [])}
    for each, result in zip(slices, results, strict=True):
        assert result.outcome is not OK or each.destination == ground.payload(1)
    results = await transport.read(peer.info, GOOD_LEASE, slices[:2], deadline_ns=in_seconds(30))
    assert [result.outcome for result in results] == [STALE] * 2
