"""What every bus does with streams: what is published is numbered and kept, and followers read it without gaps."""

import asyncio

import pytest

from halfmoon.bus.errors import BusError, NoStream, StreamGap
from halfmoon.bus.memory import MemoryBroker, MemoryBus
from halfmoon.bus.protocol import BusMessage, Delivery, Retention, StreamSpec
from support.buses import BusMaker
from support.streams import EVENTS, WORK, Reader, Worker, no_gap, publish_all
from support.wait import until, until_awaited


async def test_publishing_returns_the_sequence(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    await bus.ensure_stream(EVENTS)
    assert await bus.stream_last_seq("EVENTS") == 0
    assert [await bus.stream_publish("event.a", b"") for _ in range(3)] == [1, 2, 3]
    assert await bus.stream_publish("other.x.y", b"") == 4
    assert await bus.stream_last_seq("EVENTS") == 4


async def test_without_a_stream_there_is_a_typed_error(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    worker, reader = Worker(), Reader()
    with pytest.raises(NoStream):
        await bus.stream_publish("nowhere.a", b"", timeout_s=5.0)
    with pytest.raises(NoStream):
        await bus.stream_last_seq("NOWHERE")
    with pytest.raises(NoStream):
        await bus.stream_has("NOWHERE", 1)
    with pytest.raises(NoStream):
        await bus.consume("NOWHERE", "d", "nowhere.*", worker)
    with pytest.raises(NoStream):
        await bus.follow("NOWHERE", reader, start_seq=1, on_gap=no_gap)


async def test_a_work_queue_has_a_message_until_it_is_settled(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    await bus.ensure_stream(WORK)
    assert not await bus.stream_has("WORK", 1)
    for name in ("acked", "ended", "returned"):
        await bus.stream_publish("work.a", name.encode())
    assert [await bus.stream_has("WORK", seq) for seq in (1, 2, 3, 4)] == [True, True, True, False]
    held: list[Delivery] = []

    async def hold(delivery: Delivery) -> None:
        held.append(delivery)

    await bus.consume("WORK", "w", "work.*", hold)
    await until(lambda: len(held) == 3)
    await held[0].ack()
    await held[1].term()
    await held[2].nak(60.0)

    async def is_settled() -> bool:
        return not (await bus.stream_has("WORK", 1) or await bus.stream_has("WORK", 2))

    await until_awaited(is_settled)
    assert await bus.stream_has("WORK", 3)


async def test_ensuring_a_stream_again_changes_what_can_be_changed(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    await bus.ensure_stream(WORK)
    await bus.ensure_stream(WORK)
    with pytest.raises(NoStream):
        await bus.stream_publish("more.a", b"")
    await bus.stream_publish("work.a", b"kept")
    await bus.ensure_stream(StreamSpec(name="WORK", subjects=("work.*", "more.*"), retention=Retention.WORK_QUEUE))
    assert await bus.stream_publish("more.a", b"") == 2
    with pytest.raises(BusError, match="WORK"):
        await bus.ensure_stream(StreamSpec(name="WORK", subjects=("work.*",), retention=Retention.LIMITS))


async def test_a_message_id_is_stored_once(bus_maker: BusMaker) -> None:
    bus, other = await bus_maker(), await bus_maker()
    await bus.ensure_stream(WORK)
    worker = Worker()
    assert await bus.stream_publish("work.a", b"1", msg_id="x") == 1
    assert await other.stream_publish("work.a", b"1 again", msg_id="x") == 1
    assert await bus.stream_publish("work.a", b"2", msg_id="y") == 2
    await bus.consume("WORK", "w", "work.*", worker)
    await until(lambda: len(worker.data) == 2)
    assert worker.data == [b"1", b"2"]
    assert await bus.stream_last_seq("WORK") == 2


async def test_following_from_the_middle_then_live(bus_maker: BusMaker) -> None:
    bus, follower = await bus_maker(), await bus_maker()
    await bus.ensure_stream(EVENTS)
    await publish_all(bus, "event.a", 50)
    reader = Reader()
    await follower.follow("EVENTS", reader, start_seq=21, on_gap=no_gap)
    await until(lambda: len(reader.got) == 30)
    await publish_all(bus, "other.b.c", 700, start=50)
    await until(lambda: len(reader.got) == 730)
    assert reader.got == [(i + 1, f"{i}".encode()) for i in range(20, 750)]


async def test_following_from_the_next_sequence_waits_for_it(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    await bus.ensure_stream(EVENTS)
    await publish_all(bus, "event.a", 2)
    reader = Reader()
    await bus.follow("EVENTS", reader, start_seq=3, on_gap=no_gap)
    await bus.stream_publish("event.a", b"next")
    await until(lambda: reader.got == [(3, b"next")])


async def test_a_filter_skips_and_keeps_the_sequences(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    await bus.ensure_stream(EVENTS)
    reader = Reader()
    for i in range(6):
        await bus.stream_publish(f"event.{'ab'[i % 2]}", f"{i}".encode())
    await bus.follow("EVENTS", reader, start_seq=1, on_gap=no_gap, filter_subject="event.b")
    await bus.stream_publish("event.b", b"6")
    await until(lambda: len(reader.got) == 4)
    assert reader.got == [(2, b"1"), (4, b"3"), (6, b"5"), (7, b"6")]


async def test_two_followers_each_get_everything(bus_maker: BusMaker) -> None:
    bus, other = await bus_maker(), await bus_maker()
    await bus.ensure_stream(EVENTS)
    readers = [Reader(), Reader()]
    await bus.follow("EVENTS", readers[0], start_seq=1, on_gap=no_gap)
    await other.follow("EVENTS", readers[1], start_seq=1, on_gap=no_gap)
    await publish_all(bus, "event.a", 20)
    expected = [(i + 1, f"{i}".encode()) for i in range(20)]
    await until(lambda: readers[0].got == expected and readers[1].got == expected)


async def test_a_slow_follower_loses_nothing(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    await bus.ensure_stream(EVENTS)
    gate = asyncio.Event()
    got: list[int] = []

    async def slow(seq: int, message: BusMessage) -> None:
        await gate.wait()
        got.append(seq)

    following = await bus.follow("EVENTS", slow, start_seq=1, on_gap=no_gap)
    await publish_all(bus, "event.a", 1000)
    await until(lambda: following.pending >= 100)
    assert following.pending <= 512
    gate.set()
    await until(lambda: len(got) == 1000)
    assert got == list(range(1, 1001))
    assert following.dropped == 0


async def test_a_failing_follow_handler_goes_on(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    await bus.ensure_stream(EVENTS)
    got: list[int] = []

    async def fail_on_two(seq: int, message: BusMessage) -> None:
        got.append(seq)
        if seq == 2:
            raise RuntimeError("on purpose")

    following = await bus.follow("EVENTS", fail_on_two, start_seq=1, on_gap=no_gap)
    await publish_all(bus, "event.a", 4)
    await until(lambda: len(got) == 4)
    assert got == [1, 2, 3, 4]
    assert following.failed == 1


async def test_a_start_that_the_stream_does_not_reach_is_a_gap(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    await bus.ensure_stream(StreamSpec(name="SHORT", subjects=("short",), retention=Retention.LIMITS, max_bytes=20_000))
    for _ in range(30):
        await bus.stream_publish("short", bytes(1000))
    reader = Reader()
    with pytest.raises(StreamGap) as before:
        await bus.follow("SHORT", reader, start_seq=1, on_gap=no_gap)
    assert before.value.needed_seq == 1
    assert before.value.last_seq == 30
    assert before.value.first_seq > 1
    with pytest.raises(StreamGap) as after:
        await bus.follow("SHORT", reader, start_seq=32, on_gap=no_gap)
    assert after.value.needed_seq == 32
    following = await bus.follow("SHORT", reader, start_seq=before.value.first_seq, on_gap=no_gap)
    await until(lambda: len(reader.got) == 31 - before.value.first_seq)
    assert following.active
    with pytest.raises(ValueError, match="start_seq=0"):
        await bus.follow("SHORT", reader, start_seq=0, on_gap=no_gap)


async def test_a_follower_that_is_overtaken_learns_of_the_gap(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    await bus.ensure_stream(
        StreamSpec(name="SHORT", subjects=("short",), retention=Retention.LIMITS, max_bytes=100_000)
    )
    gate = asyncio.Event()
    reader = Reader()

    async def slow(seq: int, message: BusMessage) -> None:
        await gate.wait()
        await reader(seq, message)

    following = await bus.follow("SHORT", slow, start_seq=1, on_gap=reader.on_gap)
    # It buffers a few hundred; the stream keeps about a hundred.
    for _ in range(900):
        await bus.stream_publish("short", bytes(900))
    gate.set()
    await until(lambda: reader.gaps)
    gap = reader.gaps[0]
    assert len(reader.gaps) == 1
    assert gap.stream == "SHORT"
    assert [seq for seq, _ in reader.got] == list(range(1, gap.needed_seq))
    assert gap.first_seq > gap.needed_seq
    await until(lambda: not following.active)
    await following.unsubscribe()


async def test_a_follower_can_stop(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    await bus.ensure_stream(EVENTS)
    reader = Reader()
    following = await bus.follow("EVENTS", reader, start_seq=1, on_gap=no_gap)
    await publish_all(bus, "event.a", 2)
    await until(lambda: len(reader.got) == 2)
    await following.drain()
    await following.unsubscribe()
    await publish_all(bus, "event.a", 2)
    await bus.flush()
    assert len(reader.got) == 2
    assert not following.active


async def test_in_memory_time_can_be_virtual() -> None:
    now = 0.0
    broker = MemoryBroker(clock=lambda: now)
    bus = MemoryBus(broker)
    await bus.ensure_stream(
        StreamSpec(name="V", subjects=("v",), retention=Retention.WORK_QUEUE, duplicate_window_s=100.0)
    )
    worker = Worker(settle=False)
    await bus.consume("V", "w", "v", worker, ack_wait_s=1000.0)
    assert await bus.stream_publish("v", b"", msg_id="x") == 1
    await until(lambda: len(worker.deliveries) == 1)
    now = 99.0
    assert await bus.stream_publish("v", b"", msg_id="x") == 1
    now = 101.0
    assert await bus.stream_publish("v", b"", msg_id="x") == 2
    await until(lambda: len(worker.deliveries) == 2)
    now = 999.0
    broker.tick()
    await bus.flush()
    assert len(worker.deliveries) == 2
    now = 1000.0
    broker.tick()
    await until(lambda: len(worker.deliveries) == 3)
    assert worker.deliveries[2].stream_seq == 1
    await bus.close()
