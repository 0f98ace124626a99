"""What a subscription holds, drops and finishes: once in memory, once over a real NATS server."""

import asyncio

import pytest

from halfmoon.bus.errors import NoResponders
from halfmoon.bus.protocol import BusMessage
from support.buses import BusMaker
from support.wait import until


async def test_a_failing_handler_is_counted_and_the_subscription_goes_on(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    got: list[bytes] = []

    async def fail_on_odd(message: BusMessage) -> None:
        match message.data:
            case b"raise":
                raise RuntimeError("on purpose")
            case b"cancel":
                gone = asyncio.get_running_loop().create_future()
                gone.cancel()
                await gone
            case _:
                got.append(message.data)

    subscription = await bus.subscribe("fragile", fail_on_odd)
    for data in (b"1", b"raise", b"2", b"cancel", b"3"):
        await bus.publish("fragile", data)
    await until(lambda: got == [b"1", b"2", b"3"])
    assert subscription.failed == 2
    assert subscription.active


async def test_concurrency_is_as_asked(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    running = peak = done = 0
    gate = asyncio.Event()

    async def hold(message: BusMessage) -> None:
        nonlocal running, peak, done
        running += 1
        peak = max(peak, running)
        await gate.wait()
        running -= 1
        done += 1

    await bus.subscribe("many", hold, concurrency=4)
    for _ in range(10):
        await bus.publish("many", b"")
    await until(lambda: running == 4)
    await bus.flush()
    gate.set()
    await until(lambda: done == 10)
    assert peak == 4


async def test_a_full_queue_drops_counts_and_recovers(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    gate, holding = asyncio.Event(), asyncio.Event()
    got: list[bytes] = []

    async def hold(message: BusMessage) -> None:
        holding.set()
        await gate.wait()
        got.append(message.data)

    subscription = await bus.subscribe("slow", hold, max_pending=5)
    await bus.publish("slow", b"first")
    await holding.wait()
    for i in range(20):
        await bus.publish("slow", f"{i}".encode())
    await until(lambda: subscription.dropped + subscription.pending == 21)
    assert subscription.pending == 6
    assert subscription.dropped == 15
    gate.set()
    await until(lambda: subscription.pending == 0)
    assert got == [b"first", b"0", b"1", b"2", b"3", b"4"]
    await bus.publish("slow", b"after")
    await until(lambda: got[-1] == b"after")


async def test_pending_bytes_are_bounded_too(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    gate, holding = asyncio.Event(), asyncio.Event()

    async def hold(message: BusMessage) -> None:
        holding.set()
        await gate.wait()

    subscription = await bus.subscribe("fat", hold, max_pending_bytes=1000)
    await bus.publish("fat", b"")
    await holding.wait()
    for _ in range(5):
        await bus.publish("fat", bytes(400))
    await until(lambda: subscription.dropped == 3)
    assert subscription.pending == 3
    gate.set()


async def test_unsubscribe_stops_at_once(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    got: list[bytes] = []
    cancelled = asyncio.Event()

    async def hold(message: BusMessage) -> None:
        got.append(message.data)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    subscription = await bus.subscribe("stop", hold)
    await bus.publish("stop", b"1")
    await bus.publish("stop", b"2")
    await until(lambda: got and subscription.pending == 2)
    await subscription.unsubscribe()
    await subscription.unsubscribe()
    assert cancelled.is_set()
    assert got == [b"1"]
    assert not subscription.active
    assert subscription.pending == 0
    with pytest.raises(NoResponders):
        await bus.request("stop", b"", timeout_s=5.0)


async def test_a_handler_may_end_its_own_subscription(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    got: list[bytes] = []

    async def once(message: BusMessage) -> None:
        await subscription.unsubscribe()
        got.append(message.data)

    subscription = await bus.subscribe("once", once)
    await bus.publish("once", b"1")
    await bus.publish("once", b"2")
    await until(lambda: got)
    await bus.flush()
    assert got == [b"1"]
    assert not subscription.active


async def test_drain_handles_what_waits_and_takes_nothing_new(bus_maker: BusMaker) -> None:
    bus, other = await bus_maker(), await bus_maker()
    gate = asyncio.Event()
    got: list[bytes] = []

    async def hold(message: BusMessage) -> None:
        await gate.wait()
        got.append(message.data)

    subscription = await bus.subscribe("draining", hold)
    for data in (b"1", b"2", b"3"):
        await other.publish("draining", data)
    await until(lambda: subscription.pending == 3)
    drained = asyncio.create_task(bus.drain(10.0))
    await until(lambda: not subscription.active)
    await other.flush()
    gate.set()
    await drained
    await other.publish("draining", b"too late")
    await other.flush()
    await bus.drain(1.0)
    assert got == [b"1", b"2", b"3"]
    assert subscription.pending == 0
    # Not hearing is not being mute.
    heard: list[bytes] = []

    async def keep(message: BusMessage) -> None:
        heard.append(message.data)

    await other.subscribe("after.drain", keep)
    await bus.publish("after.drain", b"still speaking")
    await until(lambda: heard == [b"still speaking"])


async def test_drain_is_bounded(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    cancelled = asyncio.Event()

    async def hang(message: BusMessage) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    subscription = await bus.subscribe("hang", hang)
    await bus.publish("hang", b"")
    await until(lambda: subscription.pending == 1)
    async with asyncio.timeout(10.0):
        await bus.drain(0.05)
    assert cancelled.is_set()
