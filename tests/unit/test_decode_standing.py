"""A decode worker that may have been taken for lost asks before it goes on; one that was always there never does."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import structlog

from halfmoon.bus.endpoint import Envelope, serve
from halfmoon.bus.errors import BusTimeout, RemoteError
from halfmoon.bus.memory import MemoryBus
from halfmoon.bus.protocol import Delivery, Retention, StreamSpec
from halfmoon.decode import standing
from halfmoon.decode.standing import Claims, Standing
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import WorkerId
from halfmoon.schemas.splits import DecodeHalf, HalfClaim, HalfClaimed
from halfmoon.schemas.wire import Error, ErrorCode
from support.examples import EXAMPLES
from support.wait import until, until_awaited

HALF = next(example for example in EXAMPLES if isinstance(example, DecodeHalf))
WORKER = WorkerId("decode-1")


class SilentBroker(MemoryBus):
    """Answers `flush` only while it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = True
        self.num_answers = 0

    async def flush(self, timeout_s: float = 5.0) -> None:
        if not self.answers:
            raise BusTimeout("flush", timeout_s)
        self.num_answers += 1


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> SilentBroker:
    monkeypatch.setattr(standing, "HEARTBEAT_INTERVAL_S", 0.01)
    monkeypatch.setattr(standing, "DOUBT_AFTER_S", 0.3)
    monkeypatch.setattr(standing, "CLAIM_TIMEOUT_S", 0.05)
    return SilentBroker()


@pytest.fixture
async def ours(bus: SilentBroker) -> AsyncIterator[Standing]:
    ours = Standing(bus, WORKER, structlog.stdlib.get_logger("test"))
    running = asyncio.create_task(ours.run())
    yield ours
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def cut_off(bus: SilentBroker, ours: Standing) -> None:
    """For long enough, once."""
    before = ours.num_doubts()
    bus.answers = False
    await until(lambda: ours.num_doubts() > before)
    bus.answers, answered = True, bus.num_answers
    await until(lambda: bus.num_answers > answered + 2)
    assert ours.num_doubts() == before + 1


async def answer(bus: SilentBroker, *answers: HalfClaimed | Error | None) -> list[HalfClaim]:
    """A conductor that says these, one after the other."""
    asked: list[HalfClaim] = []

    async def judge(claim: HalfClaim, envelope: Envelope) -> HalfClaimed | None:
        asked.append(claim)
        said = answers[min(len(asked), len(answers)) - 1]
        if isinstance(said, Error):
            raise RemoteError(said)
        return said

    await serve(bus, subjects.CLAIM, HalfClaim, judge)
    return asked


async def test_who_is_heard_all_the_time_asks_nobody(bus: SilentBroker, ours: Standing) -> None:
    asked = await answer(bus, HalfClaimed(is_held=False))
    claims = Claims(ours, HALF)
    await until(lambda: bus.num_answers > 5)
    assert await claims.is_held()
    assert asked == []


@pytest.mark.parametrize("is_held", [True, False])
async def test_who_was_cut_off_asks_once(bus: SilentBroker, ours: Standing, is_held: bool) -> None:
    asked = await answer(bus, HalfClaimed(is_held=is_held))
    before, after = Claims(ours, HALF), None
    await cut_off(bus, ours)
    after = Claims(ours, HALF)
    assert await before.is_held() is is_held
    assert asked == [HalfClaim(request_id=HALF.request_id, transfer_id=HALF.transfer_id, worker=WORKER)]
    assert await after.is_held(), "what was taken since then is nobody else's"
    if is_held:
        assert await before.is_held()
    assert len(asked) == 1


async def test_what_it_takes_up_before_the_broker_answers_again_is_asked_for_too(
    bus: SilentBroker, ours: Standing
) -> None:
    asked = await answer(bus, HalfClaimed(is_held=False))
    bus.answers = False
    await until(lambda: ours.is_doubtful)
    claims = Claims(ours, HALF)
    bus.answers = True
    await until(lambda: not ours.is_doubtful)
    assert not await claims.is_held()
    assert len(asked) == 1


async def test_it_waits_until_somebody_can_tell(bus: SilentBroker, ours: Standing) -> None:
    busy = Error(code=ErrorCode.BUSY, message="not decided")
    asked = await answer(bus, busy, busy, HalfClaimed(is_held=False))
    claims = Claims(ours, HALF)
    await cut_off(bus, ours)
    assert not await claims.is_held()
    assert len(asked) == 3


@pytest.mark.parametrize("is_there_a_conductor", [True, False])
async def test_what_nobody_knows_and_the_queue_has_no_more_was_ended(
    bus: SilentBroker, ours: Standing, is_there_a_conductor: bool
) -> None:
    await bus.ensure_stream(StreamSpec(name=subjects.REQUESTS_STREAM, subjects=("r",), retention=Retention.WORK_QUEUE))
    seq = await bus.stream_publish("r", b"a request")
    half = msgspec.structs.replace(HALF, queue_seq=seq)
    before, first_end = Claims(ours, half), Claims(ours, half)
    if is_there_a_conductor:
        await answer(bus, None)
    await cut_off(bus, ours)
    assert await before.is_held()

    async def settle(delivery: Delivery) -> None:
        await delivery.ack()

    await bus.consume(subjects.REQUESTS_STREAM, "conductors", "r", settle)
    await until_awaited(lambda: _is_gone(bus, seq))
    assert await before.is_held(), "it was settled before"
    assert not await first_end.is_held()


async def _is_gone(bus: SilentBroker, seq: int) -> bool:
    return not await bus.stream_has(subjects.REQUESTS_STREAM, seq)


async def test_what_nobody_knows_goes_on(bus: SilentBroker, ours: Standing) -> None:
    claims = Claims(ours, HALF)
    await cut_off(bus, ours)
    assert await claims.is_held(), "no conductor is there"
    asked = await answer(bus, None)
    await cut_off(bus, ours)
    assert await claims.is_held(), "none has it"
    assert [claim.is_repeated for claim in asked] == [False] + [True] * (standing.MAX_SILENCES - 1)
