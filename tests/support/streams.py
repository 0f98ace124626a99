"""Two streams, what is done with their messages, and who notes it."""

from halfmoon.bus.errors import StreamGap
from halfmoon.bus.protocol import Bus, BusMessage, Delivery, Retention, StreamSpec

WORK = StreamSpec(name="WORK", subjects=("work.*",), retention=Retention.WORK_QUEUE)
EVENTS = StreamSpec(name="EVENTS", subjects=("event.*", "other.>"), retention=Retention.LIMITS)


async def no_gap(gap: StreamGap) -> None:
    raise AssertionError(f"unexpected gap: {gap}")


class Worker:
    """Notes its deliveries, and settles them as told."""

    def __init__(self, *, settle: bool = True) -> None:
        self.settle = settle
        self.deliveries: list[Delivery] = []

    @property
    def data(self) -> list[bytes]:
        return [delivery.data for delivery in self.deliveries]

    async def __call__(self, delivery: Delivery) -> None:
        self.deliveries.append(delivery)
        if self.settle:
            await delivery.ack()


class Reader:
    """Notes what a follower gets."""

    def __init__(self) -> None:
        self.got: list[tuple[int, bytes]] = []
        self.gaps: list[StreamGap] = []

    async def __call__(self, seq: int, message: BusMessage) -> None:
        self.got.append((seq, message.data))

    async def on_gap(self, gap: StreamGap) -> None:
        self.gaps.append(gap)


async def publish_all(bus: Bus, subject: str, count: int, start: int = 0) -> list[bytes]:
    sent = [f"{i}".encode() for i in range(start, start + count)]
    for data in sent:
        await bus.stream_publish(subject, data)
    return sent
