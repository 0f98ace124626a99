"""Token events to their reader, also when the bus is away for a while."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

import structlog

from halfmoon.bus.errors import BusDisconnected
from halfmoon.bus.memory import MemoryBus
from halfmoon.decode.completion import Piece
from halfmoon.decode.outbox import TERMINAL_GRACE_S, Outbox
from halfmoon.schemas.ids import RequestId
from halfmoon.schemas.requests import Encoding, Failed, Finished, FinishReason, Tokens, Usage
from halfmoon.schemas.wire import Error, ErrorCode
from support.wait import until
from support.workers import Reader, listen_on

REQUEST = RequestId("req-1")
FINISHED = Finished(
    request_id=REQUEST,
    seq=3,
    text="",
    finish_reason=FinishReason.LENGTH,
    usage=Usage(prompt_tokens=1, completion_tokens=3),
)


class FlakyBus(MemoryBus):
    """Loses its connection when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.full = False
        self.num_published = 0

    @property
    def is_connected(self) -> bool:
        return not self.away

    async def publish(
        self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None, reply: str | None = None
    ) -> None:
        if self.away or self.full:
            raise BusDisconnected("the buffer is full")
        self.num_published += 1
        await super().publish(subject, data, headers=headers, reply=reply)


async def always() -> bool:
    return True


def outbox_on(
    bus: MemoryBus,
    *,
    max_unsent: int = 100,
    max_batch: int = 256,
    timeout_s: float = 60.0,
    is_held: Callable[[], Awaitable[bool]] = always,
    on_dropped: Callable[[], object] = lambda: None,
) -> Outbox:
    return Outbox(
        bus,
        "reply.1",
        request_id=REQUEST,
        encoding=Encoding.MSGPACK,
        headers={},
        first_seq=0,
        max_unsent=max_unsent,
        max_batch=max_batch,
        deadline_ns=time.time_ns() + int(timeout_s * 1e9),
        is_held=is_held,
        on_dropped=on_dropped,
        log=structlog.stdlib.get_logger("test"),
    )


async def reader_on(bus: MemoryBus) -> Reader:
    return await listen_on(bus, "reply.1")


async def test_what_is_ready_goes_in_one_event() -> None:
    bus = FlakyBus()
    reader, outbox = await reader_on(bus), outbox_on(bus)
    outbox.start()
    for token in (5, 6, 7):
        await outbox.put(Piece(token, f"<{token}>"))
    assert await outbox.finish(FINISHED)
    await until(lambda: reader.terminals)
    assert reader.events == [
        Tokens(request_id=REQUEST, seq=0, tokens=(5, 6, 7), text="<5><6><7>"),
        FINISHED,
    ]
    assert outbox.sent == [5, 6, 7]
    await bus.close()


async def test_batches_have_a_bound() -> None:
    bus = FlakyBus()
    reader, outbox = await reader_on(bus), outbox_on(bus, max_batch=2)
    outbox.start()
    for token in range(5):
        await outbox.put(Piece(token, ""))
    await outbox.finish(FINISHED)
    await until(lambda: reader.terminals)
    assert [event.tokens for event in reader.events if isinstance(event, Tokens)] == [(0, 1), (2, 3), (4,)]
    assert reader.tokens == [0, 1, 2, 3, 4]
    await bus.close()


async def test_tokens_are_kept_while_the_bus_is_away_and_generation_pauses_at_the_bound() -> None:
    bus = FlakyBus()
    reader, outbox = await reader_on(bus), outbox_on(bus, max_unsent=3)
    outbox.start()
    bus.away = True
    generated: list[int] = []

    async def generate() -> None:
        for token in range(10):
            await outbox.put(Piece(token, ""))
            generated.append(token)

    task = asyncio.create_task(generate())
    await until(lambda: outbox.num_unsent == 3)
    for _ in range(50):
        await asyncio.sleep(0)
    assert generated == [0, 1, 2]
    assert (bus.num_published, reader.events, outbox.sent) == (0, [], [])
    bus.away, bus.full = False, True
    for _ in range(50):
        await asyncio.sleep(0)
    assert bus.num_published == 0
    bus.full = False
    await asyncio.wait_for(task, 10)
    assert await outbox.finish(FINISHED)
    await until(lambda: reader.terminals)
    assert reader.tokens == list(range(10))
    await bus.close()


async def test_a_terminal_event_is_given_up_in_bounded_time() -> None:
    bus = FlakyBus()
    reader, outbox = await reader_on(bus), outbox_on(bus, timeout_s=0.0)
    outbox.start()
    bus.away = True
    await outbox.put(Piece(1, ""))
    started_s = time.monotonic()
    failed = Failed(request_id=REQUEST, error=Error(code=ErrorCode.DEADLINE, message="late"))
    assert not await outbox.finish(failed)
    assert time.monotonic() - started_s < TERMINAL_GRACE_S + 5
    bus.away = False
    assert reader.events == []
    await bus.close()


async def test_a_terminal_event_needs_no_tokens_before_it() -> None:
    bus = FlakyBus()
    reader, outbox = await reader_on(bus), outbox_on(bus)
    failed = Failed(request_id=REQUEST, error=Error(code=ErrorCode.INTERNAL, message="broken"))
    assert await outbox.finish(failed)
    await until(lambda: reader.terminals)
    assert reader.events == [failed]
    await bus.close()


async def test_what_others_go_on_with_is_dropped_without_a_word() -> None:
    bus, is_held, dropped = FlakyBus(), True, list[bool]()

    async def asked() -> bool:
        return is_held

    reader = await reader_on(bus)
    outbox = outbox_on(bus, max_unsent=2, is_held=asked, on_dropped=lambda: dropped.append(True))
    outbox.start()
    await outbox.put(Piece(5, "<5>"))
    await until(lambda: reader.tokens == [5])
    is_held = False
    for token in range(10):
        await outbox.put(Piece(token, "<>"))
    assert not await outbox.finish(FINISHED)
    assert outbox.is_dropped
    assert dropped == [True]
    assert outbox.sent == [5]
    assert bus.num_published == 1
