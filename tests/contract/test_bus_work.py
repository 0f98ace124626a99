"""What every bus does with stored work: shared between processes, settled, and delivered again where it isn't."""

import asyncio
from collections import Counter

import pytest

from halfmoon.bus.endpoint import acknowledge
from halfmoon.bus.errors import StreamFull
from halfmoon.bus.protocol import Bus, BusMessage, Delivery, Retention, StreamSpec
from support.buses import BusMaker
from support.streams import WORK, Worker, publish_all
from support.wait import until


async def test_work_is_delivered_once_in_order_and_whole(bus_maker: BusMaker) -> None:
    bus, consumer = await bus_maker(), await bus_maker()
    await bus.ensure_stream(WORK)
    worker = Worker()
    early = await publish_all(bus, "work.a", 20)
    await consumer.consume("WORK", "w", "work.*", worker)
    late = await publish_all(bus, "work.b", 200, start=20)
    await until(lambda: len(worker.data) == 220)
    assert worker.data == early + late
    assert [delivery.stream_seq for delivery in worker.deliveries] == list(range(1, 221))
    assert {delivery.num_delivered for delivery in worker.deliveries} == {1}
    assert [delivery.subject for delivery in worker.deliveries] == ["work.a"] * 20 + ["work.b"] * 200


async def test_the_reply_subject_of_stream_messages_is_lost_and_the_header_survives(bus_maker: BusMaker) -> None:
    """JetStream puts its ack subject where the reply was: so reply subjects travel in `halfmoon-reply`."""
    bus = await bus_maker()
    await bus.ensure_stream(WORK)
    worker = Worker()
    receipts: list[bytes] = []

    async def keep(message: BusMessage) -> None:
        receipts.append(message.data)

    inbox = bus.new_inbox()
    await bus.subscribe(inbox, keep)
    await bus.publish("work.a", b"data", headers={"halfmoon-reply": inbox}, reply=inbox)
    await bus.consume("WORK", "w", "work.*", worker)
    await until(lambda: worker.deliveries and receipts)
    message = worker.deliveries[0].message
    assert message.reply is None
    assert message.headers["halfmoon-reply"] == inbox
    # What came to the reply subject is the stream's receipt, not an answer of whoever did the work.
    assert len(receipts) == 1
    assert b'"seq":1' in receipts[0].replace(b" ", b"")


async def test_processes_share_work_under_one_durable_name(bus_maker: BusMaker) -> None:
    publisher = await bus_maker()
    await publisher.ensure_stream(WORK)
    workers = [Worker() for _ in range(3)]
    for worker in workers:
        await (await bus_maker()).consume("WORK", "shared", "work.*", worker, max_outstanding=4)
    sent = await publish_all(publisher, "work.a", 150)
    await until(lambda: sum(len(worker.data) for worker in workers) == 150)
    assert sorted(data for worker in workers for data in worker.data) == sorted(sent)
    assert all(worker.data for worker in workers)


async def test_a_receipt_settles_for_whoever_has_the_message_by_then(bus_maker: BusMaker) -> None:
    bus, other = await bus_maker(), await bus_maker()
    await bus.ensure_stream(WORK)
    worker = Worker(settle=False)
    await bus.consume("WORK", "w", "work.*", worker, ack_wait_s=0.5)
    await bus.stream_publish("work.a", b"first")
    await until(lambda: len(worker.deliveries) == 2)
    await acknowledge(other, worker.deliveries[0].receipt)
    await other.flush()
    await bus.stream_publish("work.a", b"second")
    # The second comes again and again; the first never, also after a late settlement.
    await worker.deliveries[1].nak()
    await until(lambda: worker.data.count(b"second") == 3)
    assert worker.data.count(b"first") == 2


async def test_unsettled_work_comes_again(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    await bus.ensure_stream(WORK)
    worker = Worker(settle=False)
    await bus.consume("WORK", "w", "work.*", worker, ack_wait_s=0.3)
    await bus.stream_publish("work.a", b"stubborn")
    await until(lambda: len(worker.deliveries) >= 3)
    assert set(worker.data) == {b"stubborn"}
    assert [delivery.num_delivered for delivery in worker.deliveries[:3]] == [1, 2, 3]
    assert {delivery.stream_seq for delivery in worker.deliveries} == {1}


async def test_in_progress_keeps_work_where_it_is(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    await bus.ensure_stream(WORK)
    worker = Worker(settle=False)
    await bus.consume("WORK", "w", "work.*", worker, ack_wait_s=1.2)
    await bus.stream_publish("work.kept", b"kept")
    await bus.stream_publish("work.left", b"left")
    await until(lambda: len(worker.deliveries) == 2)
    kept = worker.deliveries[0]

    async def keep_alive() -> None:
        while True:
            await kept.in_progress()
            await asyncio.sleep(0.1)

    beating = asyncio.create_task(keep_alive())
    # The other one, delivered in the same moment and left alone, comes again meanwhile.
    await until(lambda: worker.data.count(b"left") == 2)
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)
    assert worker.data.count(b"kept") == 1
    await until(lambda: worker.data.count(b"kept") == 2)


async def test_nak_gives_work_back_at_once_or_after_its_delay(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    await bus.ensure_stream(WORK)
    times: dict[bytes, list[float]] = {b"now": [], b"later": []}

    async def refuse_once(delivery: Delivery) -> None:
        times[delivery.data].append(asyncio.get_running_loop().time())
        if delivery.num_delivered == 1:
            await delivery.nak(0.5 if delivery.data == b"later" else 0.0)
        else:
            await delivery.ack()

    await bus.consume("WORK", "w", "work.*", refuse_once, ack_wait_s=60.0)
    await bus.stream_publish("work.a", b"later")
    await bus.stream_publish("work.a", b"now")
    await until(lambda: len(times[b"now"]) == 2 and len(times[b"later"]) == 2)
    assert times[b"later"][1] - times[b"later"][0] >= 0.45
    assert times[b"now"][1] < times[b"later"][1]


async def test_terminated_work_never_comes_again(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    await bus.ensure_stream(WORK)
    seen: Counter[bytes] = Counter()

    async def handle(delivery: Delivery) -> None:
        seen[delivery.data] += 1
        if delivery.data == b"bad":
            await delivery.term()
            await delivery.nak()

    await bus.consume("WORK", "w", "work.*", handle, ack_wait_s=0.2)
    await bus.stream_publish("work.a", b"bad")
    await bus.stream_publish("work.a", b"good")
    await until(lambda: seen[b"good"] >= 3)
    assert seen[b"bad"] == 1


async def test_max_deliver_ends_redelivery(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    await bus.ensure_stream(WORK)
    worker = Worker(settle=False)
    await bus.consume("WORK", "w", "work.*", worker, ack_wait_s=0.2, max_deliver=2)
    await bus.stream_publish("work.a", b"first")
    await until(lambda: worker.data.count(b"first") == 2)
    await bus.stream_publish("work.a", b"second")
    await until(lambda: worker.data.count(b"second") == 2)
    assert worker.data.count(b"first") == 2


async def test_a_failing_handler_gives_its_work_back(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    await bus.ensure_stream(WORK)
    numbers: list[int] = []

    async def fail_once(delivery: Delivery) -> None:
        numbers.append(delivery.num_delivered)
        if delivery.num_delivered == 1:
            raise RuntimeError("on purpose")
        await delivery.ack()

    consumption = await bus.consume("WORK", "w", "work.*", fail_once, ack_wait_s=60.0)
    await bus.stream_publish("work.a", b"")
    await until(lambda: numbers == [1, 2])
    assert consumption.failed == 1
    assert consumption.active


async def test_the_work_of_a_dead_process_goes_to_another(bus_maker: BusMaker) -> None:
    publisher, dying, heir = await bus_maker(), await bus_maker(), await bus_maker()
    await publisher.ensure_stream(WORK)
    hoarder, worker = Worker(settle=False), Worker()
    await dying.consume("WORK", "w", "work.*", hoarder, ack_wait_s=0.5)
    sent = await publish_all(publisher, "work.a", 5)
    await until(lambda: len(hoarder.deliveries) >= 5)
    await dying.close()
    await heir.consume("WORK", "w", "work.*", worker, ack_wait_s=0.5)
    await until(lambda: len(worker.deliveries) == 5)
    assert sorted(worker.data) == sent
    assert all(delivery.num_delivered >= 2 for delivery in worker.deliveries)


async def test_no_more_is_held_than_asked_for(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    await bus.ensure_stream(WORK)
    worker = Worker(settle=False)
    consumption = await bus.consume("WORK", "w", "work.*", worker, ack_wait_s=60.0, max_outstanding=3)
    await publish_all(bus, "work.a", 10)
    await until(lambda: len(worker.deliveries) == 3)
    await bus.flush()
    assert consumption.pending == 3
    for number in range(10):
        await until(lambda number=number: len(worker.deliveries) > number)  # type: ignore[misc]
        assert consumption.pending <= 3
        await worker.deliveries[number].ack()
    await until(lambda: consumption.pending == 0)
    assert worker.data == [f"{i}".encode() for i in range(10)]


async def test_all_processes_together_hold_no_more_than_max_ack_pending(bus_maker: BusMaker) -> None:
    publisher = await bus_maker()
    await publisher.ensure_stream(WORK)
    worker = Worker(settle=False)
    for _ in range(2):
        await (await bus_maker()).consume("WORK", "w", "work.*", worker, ack_wait_s=60.0, max_ack_pending=4)
    await publish_all(publisher, "work.a", 10)
    await until(lambda: len(worker.deliveries) == 4)
    await publisher.flush()
    assert len(worker.deliveries) == 4
    await worker.deliveries[0].ack()
    await until(lambda: len(worker.deliveries) == 5)
    assert sorted(worker.data) == [b"0", b"1", b"2", b"3", b"4"]


async def test_draining_a_consumption_finishes_what_runs(bus_maker: BusMaker) -> None:
    bus, heir = await bus_maker(), await bus_maker()
    await bus.ensure_stream(WORK)
    gate = asyncio.Event()
    done: list[bytes] = []

    async def hold(delivery: Delivery) -> None:
        await gate.wait()
        done.append(delivery.data)
        await delivery.ack()

    consumption = await bus.consume("WORK", "w", "work.*", hold, ack_wait_s=60.0)
    await publish_all(bus, "work.a", 3)
    await until(lambda: consumption.pending == 3)
    drained = asyncio.create_task(bus.drain(10.0))
    await until(lambda: not consumption.active)
    gate.set()
    await drained
    assert sorted(done) == [b"0", b"1", b"2"]
    worker = Worker()
    await heir.consume("WORK", "w", "work.*", worker, ack_wait_s=60.0)
    await publish_all(heir, "work.a", 1, start=3)
    await until(lambda: worker.data == [b"3"])


async def test_a_full_work_queue_refuses_and_loses_nothing(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    await bus.ensure_stream(
        StreamSpec(name="SMALL", subjects=("small",), retention=Retention.WORK_QUEUE, max_bytes=4000)
    )

    async def fill() -> None:
        for _ in range(10):
            await bus.stream_publish("small", bytes(1000))

    with pytest.raises(StreamFull):
        await fill()
    stored = await bus.stream_last_seq("SMALL")
    assert 2 <= stored <= 4
    worker = Worker()
    await bus.consume("SMALL", "w", "small", worker)
    await until(lambda: len(worker.deliveries) == stored)
    assert await eventually_published(bus, "small") == stored + 1


async def eventually_published(bus: Bus, subject: str) -> int:
    """Acks free room a moment later."""
    async with asyncio.timeout(10.0):
        while True:
            try:
                return await bus.stream_publish(subject, bytes(1000))
            except StreamFull:
                await asyncio.sleep(0.01)
