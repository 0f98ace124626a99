"""Cancel, deadline and let-go in each state: one terminal event, and everything is given back."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from halfmoon.bus.endpoint import announce
from halfmoon.pool import PoolClient
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import RequestId, TransferId
from halfmoon.schemas.requests import Failed, RequestCancel
from halfmoon.schemas.splits import Role, TransferDone
from halfmoon.schemas.wire import ErrorCode
from support.exact_engine import CHUNK_TOKENS, ExactEngine, reference
from support.wait import until
from support.workers import DECODE, PREFILL, SEED, Cluster, cluster, prompt

TOKENS = prompt(3 * CHUNK_TOKENS + 5)

PREFILL_STATES = ["queued", "acquiring", "computing", "handing_over"]
DECODE_STATES = ["queued", "waiting_kv", "loading", "recomputing", "generating"]


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Cluster]:
    settings: dict[str, object] = {"max_requests": 1, "max_queue": 4}
    async with cluster(tmp_path, decode_settings=settings, prefill_settings=settings) as running:
        yield running


@pytest.fixture
def slow_pool(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Answers of `acquire` are on their way, with the lease granted, until the event is set."""
    gate = asyncio.Event()
    real = PoolClient.acquire

    async def acquire(self: PoolClient, *args: object, **settings: object) -> object:
        answer = await real(self, *args, **settings)  # type: ignore[arg-type]
        await gate.wait()
        return answer

    monkeypatch.setattr(PoolClient, "acquire", acquire)
    return gate


async def prefill_in(pair: Cluster, state: str) -> None:
    """One prefill half of request `req-…`, the last that was made, in this state."""
    reuse = []
    if state == "acquiring":
        await warm(pair)
        reuse = [(pair.node_a.source,)] * 3
    if state == "computing":
        pair.prefill_engine.hold("prefill")
    if state == "queued":
        pair.prefill_engine.hold("prefill")
        blocker, _ = pair.halves(prompt(CHUNK_TOKENS * 2, first=9))
        await pair.send_prefill(blocker)
    half, _ = pair.halves(TOKENS, reuse=reuse)
    await pair.send_prefill(half)
    await until(lambda: [run.state.value for run in pair.prefill._runs.values()][-1:] == [state], what=state)


async def warm(pair: Cluster) -> None:
    half, _ = pair.halves(TOKENS)
    await pair.send_prefill(half)
    await until(lambda: [run.state.value for run in pair.prefill._runs.values()] == ["handing_over"])
    await done(pair, 1)
    await until(lambda: not pair.prefill._runs)


async def done(pair: Cluster, number: int) -> None:
    message = TransferDone(request_id=RequestId(f"req-{number}"), transfer_id=TransferId(f"xfer-{number}"))
    await announce(pair.bus, subjects.split_prefill(PREFILL), message)


@pytest.mark.parametrize("state", PREFILL_STATES)
@pytest.mark.parametrize("how", ["cancel", "let_go"])
async def test_prefill_gives_all_back(pair: Cluster, slow_pool: asyncio.Event, state: str, how: str) -> None:
    if state != "acquiring":
        slow_pool.set()
    await prefill_in(pair, state)
    number = pair._number
    if how == "cancel":
        await announce(pair.bus, subjects.CANCEL, cancel_of(number))
    else:
        await done(pair, number)
    slow_pool.set()
    if state == "queued":
        await until(lambda: len(pair.prefill._runs) == 1)
        await announce(pair.bus, subjects.CANCEL, cancel_of(number - 1))
    await pair.idle()
    ended = next(ended for ended in pair.ended_of(Role.PREFILL) if ended.request_id == f"req-{number}")
    assert (ended.error.code if ended.error else None) == (ErrorCode.CANCELLED if how == "cancel" else None)
    assert pair.prefill_engine.stats().free_tokens == pair.prefill_engine.total_tokens
    assert pair.failures == []


def cancel_of(number: int) -> RequestCancel:
    return RequestCancel(request_id=RequestId(f"req-{number}"))


async def decode_in(pair: Cluster, state: str, timeout_s: float) -> None:
    if state == "queued":
        pair.decode_engine.hold("decode")
        _, blocker = pair.halves(prompt(5), prefill_worker=None)
        await pair.send_decode(blocker)
    if state == "loading":
        pair.decode_engine.hold("load")
    if state in ("recomputing", "generating"):
        pair.decode_engine.hold("decode")
    prefill, half = pair.halves(TOKENS, timeout_s=timeout_s, prefill_worker=None if state == "recomputing" else PREFILL)
    await pair.send_decode(half)
    if state in ("loading", "generating"):
        await pair.send_prefill(prefill)
    await until(lambda: [run.state.value for run in pair.decode._runs.values()][-1:] == [state], what=state)


@pytest.mark.parametrize("state", DECODE_STATES)
@pytest.mark.parametrize("how", ["cancel", "deadline", "stop"])
async def test_decode_gives_all_back_and_says_so_once(tmp_path: Path, state: str, how: str) -> None:
    settings: dict[str, object] = {"max_requests": 1, "max_queue": 4}
    async with cluster(tmp_path, decode_settings=settings) as pair:
        reader = await pair.listen("reply.*")
        await decode_in(pair, state, timeout_s=2.5 if how == "deadline" else 60.0)
        number = pair._number
        if how == "cancel":
            await announce(pair.bus, subjects.split_decode(DECODE), cancel_of(number))
        elif how == "stop":
            await pair.decode.stop()
        await until(lambda: any(event.request_id == f"req-{number}" for event in reader.terminals))
        if state == "queued" and how != "stop":
            await announce(pair.bus, subjects.CANCEL, cancel_of(number - 1))
        if how != "stop":
            await pair.idle()
        failed = [event for event in reader.terminals if event.request_id == f"req-{number}"]
        assert len(failed) == 1
        assert isinstance(failed[0], Failed)
        expected = {"cancel": ErrorCode.CANCELLED, "deadline": ErrorCode.DEADLINE, "stop": ErrorCode.UNAVAILABLE}
        assert failed[0].error.code is expected[how]
        await until(lambda: any(ended.request_id == f"req-{number}" for ended in pair.ended_of(Role.DECODE)))
        assert pair.decode_engine.stats().free_tokens == pair.decode_engine.total_tokens
        assert pair.failures == []


async def test_cancel_between_two_tokens_stops_the_engine_at_once(pair: Cluster) -> None:
    gate = pair.decode_engine.hold("decode")
    _, half, reader = await pair.submit(TOKENS)
    await until(lambda: pair.decode_engine.at.get("decode") == 1)
    await pair.cancel(half.request_id)
    failed = await reader.failed()
    gate.set()
    assert failed.error.code is ErrorCode.CANCELLED
    assert failed.error.message == "cancelled by the client"
    await pair.idle()
    assert pair.decode_engine.at["decode"] == 1
    assert len(reader.terminals) == 1


async def test_cancel_for_somebody_else_changes_nothing(pair: Cluster) -> None:
    gate = pair.decode_engine.hold("decode")
    _, _, reader = await pair.submit(TOKENS)
    await announce(pair.bus, subjects.CANCEL, cancel_of(99))
    gate.set()
    await reader.finished()
    assert reader.tokens == reference(TOKENS, 6, SEED)


async def test_many_cancels_at_any_time_leave_nothing(tmp_path: Path) -> None:
    """200 requests, each cancelled after another number of turns of the loop."""
    async with cluster(tmp_path, prefill_engine=ExactEngine(512), decode_engine=ExactEngine(512)) as pair:
        _, _, first = await pair.submit(TOKENS)
        await first.finished()
        reader = await pair.listen("reply.*")
        await pair.idle()
        baseline = len(asyncio.all_tasks())

        async def one(number: int) -> None:
            prefill, half = pair.halves(prompt(5 + number % 40, first=number))
            await asyncio.gather(pair.send_prefill(prefill), pair.send_decode(half))
            for _ in range(3 * (number % 60)):
                await asyncio.sleep(0)
            await pair.cancel(half.request_id)

        for begin in range(0, 200, 10):
            await asyncio.gather(*(one(begin + offset) for offset in range(10)))
        await pair.idle()
        assert len(reader.terminals) == 200
        assert len({event.request_id for event in reader.terminals}) == 200
        assert len(asyncio.all_tasks()) <= baseline
        assert pair.prefill_engine.stats().running == pair.decode_engine.stats().running == 0
