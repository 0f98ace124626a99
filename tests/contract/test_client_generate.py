"""The client of the token protocol, in memory and over NATS."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from halfmoon.bus.memory import MemoryBus
from halfmoon.client import GenerateClient
from halfmoon.schemas.ids import RequestId
from halfmoon.schemas.requests import Failed, Finished, RequestSubmitted, Sampling, TokenEvent, Tokens
from halfmoon.schemas.wire import HEADER_DEADLINE, ErrorCode
from halfmoon.text import TextCodec
from support import tiny_tokenizer
from support.buses import BusMaker
from support.fake_cluster import MODEL, REQUESTS, Answering, FakeCluster, saying, soon_ns
from support.wait import until


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec.load(tiny_tokenizer.byte_level(tmp_path_factory.mktemp("level")))


@pytest.fixture
async def cluster(bus_maker: BusMaker, codec: TextCodec) -> AsyncIterator[FakeCluster]:
    cluster = FakeCluster(await bus_maker(), saying(codec, "moon 😀"))
    await cluster.start()
    yield cluster
    await cluster.stop()


@pytest.fixture
async def client(cluster: FakeCluster, bus_maker: BusMaker) -> AsyncIterator[GenerateClient]:
    async with GenerateClient(await bus_maker()) as client:
        yield client


def _request(name: str = "r-1", tokens: tuple[int, ...] = (1, 2, 3)) -> RequestSubmitted:
    return RequestSubmitted(request_id=RequestId(name), model=MODEL, tokens=tokens, sampling=Sampling(max_tokens=50))


async def _read(client: GenerateClient, request: RequestSubmitted, seconds: float = 20.0) -> list[TokenEvent]:
    async with aclosing(client.submit(request, deadline_ns=soon_ns(seconds))) as events:
        return [event async for event in events]


def _text(events: list[TokenEvent]) -> str:
    return "".join(event.text for event in events if not isinstance(event, Failed))


def _failure(events: list[TokenEvent]) -> tuple[ErrorCode, str]:
    (last,) = [event for event in events if not isinstance(event, Tokens)]
    assert last is events[-1]
    assert isinstance(last, Failed)
    return last.error.code, last.error.message


async def test_tokens_in_order_and_one_end(client: GenerateClient, cluster: FakeCluster) -> None:
    events = await _read(client, _request())
    assert _text(events) == "moon 😀"
    assert [type(event) for event in events[-2:]] == [Tokens, Finished]
    assert cluster.seen == [_request()]
    assert int(cluster.headers[0][HEADER_DEADLINE]) <= soon_ns()
    assert cluster.cancelled == []
    assert client.num_open == 0


async def test_an_id_is_drawn_where_there_is_none(client: GenerateClient, cluster: FakeCluster) -> None:
    request = RequestSubmitted(model=MODEL, tokens=(1,))
    events = await _read(client, request)
    assert {event.request_id for event in events} == {cluster.seen[0].request_id}
    assert _text(events) == "moon 😀"


async def test_many_at_once_over_one_subscription(client: GenerateClient) -> None:
    results = await asyncio.gather(*(_read(client, _request(f"r-{number}")) for number in range(20)))
    assert {_text(events) for events in results} == {"moon 😀"}


async def test_ids_may_hold_what_subjects_may_not(client: GenerateClient) -> None:
    assert _text(await _read(client, _request("my request/1.5 *>"))) == "moon 😀"


async def test_repeats_after_a_hand_over_are_invisible(client: GenerateClient, cluster: FakeCluster) -> None:
    async def twice(answering: Answering) -> None:
        for _ in range(2):
            answering.num_tokens = 0
            for token, text in enumerate("abc"):
                await answering.tokens([token], text)
        await answering.tokens([3], "d")
        await answering.finish()
        await answering.finish()

    cluster.script = twice
    events = await _read(client, _request())
    assert _text(events) == "abcd"
    assert [event.seq for event in events if not isinstance(event, Failed)] == [0, 1, 2, 3, 4]


async def test_a_gap_is_an_error_and_cancels(client: GenerateClient, cluster: FakeCluster) -> None:
    async def gappy(answering: Answering) -> None:
        await answering.tokens([0], "a")
        answering.num_tokens += 2
        await answering.tokens([3], "d")

    cluster.script = gappy
    code, message = _failure(await _read(client, _request()))
    assert code is ErrorCode.INTERNAL
    assert "tokens 1 to 2" in message
    await until(lambda: cluster.cancelled == ["r-1"])


async def test_a_refusal_is_passed_on(client: GenerateClient, cluster: FakeCluster) -> None:
    async def refuse(answering: Answering) -> None:
        await answering.fail(ErrorCode.OVERLOADED, "later", 3.0)

    cluster.script = refuse
    assert _failure(await _read(client, _request())) == (ErrorCode.OVERLOADED, "later")
    assert cluster.cancelled == []


async def test_the_deadline_ends_it_and_cancels(client: GenerateClient, cluster: FakeCluster) -> None:
    async def stall(answering: Answering) -> None:
        await answering.tokens([0], "a")
        await asyncio.Event().wait()

    cluster.script = stall
    events = await _read(client, _request(), seconds=0.3)
    assert _text(events) == "a"
    assert _failure(events)[0] is ErrorCode.DEADLINE
    await until(lambda: cluster.cancelled == ["r-1"])


async def test_closing_early_cancels(client: GenerateClient, cluster: FakeCluster) -> None:
    async def endless(answering: Answering) -> None:
        while True:
            await answering.tokens([0], "a")
            await asyncio.sleep(0.01)

    cluster.script = endless
    async with aclosing(client.submit(_request(), deadline_ns=soon_ns())) as events:
        async for _ in events:
            break
    await until(lambda: cluster.cancelled == ["r-1"])
    assert client.num_open == 0


async def test_a_cancelled_reader_cancels(client: GenerateClient, cluster: FakeCluster) -> None:
    async def silent(answering: Answering) -> None:
        await asyncio.Event().wait()

    cluster.script = silent
    reading = asyncio.create_task(_read(client, _request()))
    await until(lambda: cluster.seen)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await until(lambda: cluster.cancelled == ["r-1"])


async def test_a_reader_that_never_reads_costs_a_bounded_buffer(cluster: FakeCluster, bus_maker: BusMaker) -> None:
    async def flood(answering: Answering) -> None:
        for _ in range(100):
            await answering.tokens([0], "a")
        await asyncio.Event().wait()

    cluster.script = flood
    async with GenerateClient(await bus_maker(), max_waiting_events=10) as client:
        async with aclosing(client.submit(_request(), deadline_ns=soon_ns())) as events:
            first = await anext(events)
            assert isinstance(first, Tokens)
            await until(lambda: client._open["r-1"].ended is not None)
            rest = [event async for event in events]
        assert len(rest) <= 11
        code, message = _failure(rest)
        assert code is ErrorCode.OVERLOADED
        assert "too slow" in message
        await until(lambda: cluster.cancelled == ["r-1"])


async def test_what_cannot_be_read_is_an_error(client: GenerateClient, cluster: FakeCluster) -> None:
    async def garbage(answering: Answering) -> None:
        await answering._bus.publish(answering._reply, b"\xc1garbage")

    cluster.script = garbage
    code, message = _failure(await _read(client, _request()))
    assert code is ErrorCode.INTERNAL
    assert "can't be read" in message


async def test_without_a_queue_it_fails_at_once(bus_maker: BusMaker) -> None:
    async with GenerateClient(await bus_maker()) as client:
        code, message = _failure(await _read(client, _request()))
    assert code is ErrorCode.UNAVAILABLE
    assert "conductor" in message


async def test_closing_the_client_ends_what_is_open(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    await bus.ensure_stream(REQUESTS)
    client = GenerateClient(bus)
    await client.start()
    reading = asyncio.create_task(_read(client, _request()))
    await until(lambda: client.num_open)
    await client.close()
    assert _failure(await reading)[0] is ErrorCode.UNAVAILABLE
    await client.close()


async def test_misuse_is_said() -> None:
    bus = MemoryBus()
    client = GenerateClient(bus)
    with pytest.raises(ValueError, match="model"):
        client.submit(RequestSubmitted(tokens=(1,)), deadline_ns=soon_ns())
    with pytest.raises(RuntimeError, match="start"):
        await _read(client, _request())
    await bus.close()
