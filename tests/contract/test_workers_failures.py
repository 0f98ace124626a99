"""What can go wrong between prefill and decode costs time, never the right tokens; and leaves nothing behind."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from halfmoon.bus.endpoint import announce, call
from halfmoon.bus.errors import RemoteError
from halfmoon.decode.kv import CHECK_S
from halfmoon.decode.state import HalfState as DecodeState
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import WorkerId
from halfmoon.schemas.members import MEMBER_LOST_AFTER_S, Goodbye, MemberState
from halfmoon.schemas.requests import Sampling
from halfmoon.schemas.splits import HalfAccepted, KvFailed, KvReady, Role
from halfmoon.schemas.wire import Error, ErrorCode
from support.exact_engine import CHUNK_TOKENS, ExactEngine
from support.fixed_prompt import EXPECTED, TOKENS, announced, right
from support.wait import until
from support.workers import DECODE, PREFILL, Cluster, cluster, prompt


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Cluster]:
    settings: dict[str, object] = {"resplit_grace_s": 0.2}
    async with cluster(tmp_path, decode_settings=settings) as running:
        yield running


async def test_announcements_may_come_before_the_half(pair: Cluster) -> None:
    _, decode, reader = await announced(pair)
    assert len(pair.decode._early) == 1
    await pair.send_decode(decode)
    await right(pair, reader, loaded_tokens=len(TOKENS) - 1)
    assert len(pair.decode._early) == 0


async def test_prefill_silent_midway(pair: Cluster) -> None:
    gate = pair.prefill_engine.hold("prefill")
    _, _, reader = await pair.submit(TOKENS)
    await until(lambda: pair.prefill_engine.at.get("prefill") == 1)
    pair.beating.discard(PREFILL)
    await reader.finished()
    gate.set()
    await right(pair, reader, loaded_tokens=0)


async def test_prefill_says_goodbye_midway(pair: Cluster) -> None:
    pair.prefill_engine.hold("prefill")
    _, _, reader = await pair.submit(TOKENS)
    await until(lambda: pair.prefill_engine.at.get("prefill") == 1)
    pair.beating.discard(PREFILL)
    await pair.prefill.stop()
    await right(pair, reader, loaded_tokens=0)


@pytest.mark.parametrize("sign", ["silence", "goodbye", "restart"])
async def test_a_lost_decode_worker_is_not_held_for(pair: Cluster, sign: str) -> None:
    """Long before the hand-over's own limit, and with nobody telling."""
    await announced(pair)
    heard = pair.prefill._peers.num_heard
    await until(lambda: pair.prefill._peers.num_heard > heard + 2, what="heartbeats")
    pair.beating.discard(DECODE)
    if sign == "goodbye":
        await announce(pair.bus, subjects.heartbeat(DECODE), Goodbye(worker=DECODE))
    elif sign == "restart":
        later = msgspec.structs.replace(pair.decode.heartbeat(), started_ns=time.time_ns())
        await announce(pair.bus, subjects.heartbeat(DECODE), later)
    await pair.idle()
    assert pair.ended_of(Role.PREFILL)[0].error is None
    # What others can use stays.
    assert pair.node_a.service.store.ledger.slots.num_registered == len(TOKENS) // CHUNK_TOKENS


async def test_a_decode_worker_that_beats_is_held_for(pair: Cluster) -> None:
    _, decode, reader = await announced(pair)
    started = asyncio.get_running_loop().time()
    await until(lambda: asyncio.get_running_loop().time() > started + MEMBER_LOST_AFTER_S + 0.5, what="time")
    await pair.send_decode(decode)
    await right(pair, reader, loaded_tokens=len(TOKENS) - 1)


async def test_an_engine_that_breaks_in_prefill_stops_that_worker_only(pair: Cluster) -> None:
    gate = pair.prefill_engine.hold("prefill")
    _, _, reader = await pair.submit(TOKENS)
    await until(lambda: pair.prefill_engine.at.get("prefill") == 1)
    pair.prefill_engine.broken = RuntimeError("device lost")
    gate.set()
    await right(pair, reader, loaded_tokens=0)
    assert [failure for failure in pair.failures if "device lost" in failure] == pair.failures
    assert len(pair.failures) == 1
    ended = pair.ended_of(Role.PREFILL)[0]
    assert ended.error is not None
    assert ended.error.code is ErrorCode.INTERNAL


async def test_an_engine_that_breaks_in_decode_fails_its_requests_and_ends_the_worker(pair: Cluster) -> None:
    gate = pair.decode_engine.hold("decode")
    _, _, reader = await pair.submit(TOKENS)
    await until(lambda: pair.decode_engine.at.get("decode") == 1)
    pair.decode_engine.broken = RuntimeError("device lost")
    gate.set()
    failed = await reader.failed()
    await pair.idle()
    assert failed.error.code is ErrorCode.INTERNAL
    assert "device lost" in failed.error.message
    assert len(reader.terminals) == len(pair.failures) == 1
    ended = pair.ended_of(Role.DECODE)[0]
    assert ended.error == failed.error


async def test_what_the_pool_has_no_room_for_is_left_to_decode(tmp_path: Path) -> None:
    async with cluster(tmp_path, num_slots=2) as pair:
        _, _, reader = await pair.submit(TOKENS)
        await right(pair, reader, loaded_tokens=2 * CHUNK_TOKENS)
        assert pair.prefill_engine.prefilled == [(0, 2 * CHUNK_TOKENS)]


async def test_decode_with_a_small_pool_pulls_in_turns(tmp_path: Path) -> None:
    async with cluster(tmp_path, num_slots_b=2) as pair:
        _, decode, reader = await announced(pair)
        await pair.send_decode(decode)
        await right(pair, reader, loaded_tokens=len(TOKENS) - 1)


async def test_without_any_prefill_worker_decode_computes(pair: Cluster) -> None:
    _, decode = pair.halves(TOKENS, prefill_worker=None)
    reader = await pair.listen(decode.reply)
    await pair.send_decode(decode)
    await right(pair, reader, loaded_tokens=0)


async def test_a_new_attempt_names_another_prefill_worker(pair: Cluster) -> None:
    prefill, decode = pair.halves(TOKENS, prefill_worker=WorkerId("prefill-gone"))
    reader = await pair.listen(decode.reply)
    await pair.send_decode(decode)
    await pair.send_decode(msgspec.structs.replace(decode, attempt=2, prefill_worker=PREFILL))
    await pair.send_prefill(msgspec.structs.replace(prefill, attempt=2))
    await right(pair, reader, loaded_tokens=len(TOKENS) - 1)


async def test_a_lost_prefill_worker_is_not_waited_for(pair: Cluster) -> None:
    _, decode = pair.halves(TOKENS, prefill_worker=WorkerId("prefill-gone"))
    reader = await pair.listen(decode.reply)
    await pair.send_decode(decode)
    await right(pair, reader, loaded_tokens=0)


async def test_a_failure_told_at_the_very_moment_of_a_check_is_not_forgotten(pair: Cluster) -> None:
    _, decode = pair.halves(TOKENS)
    reader = await pair.listen(decode.reply)
    await pair.send_decode(decode)
    run = pair.decode._runs[decode.transfer_id]
    await until(lambda: run.state is DecodeState.WAITING_KV)
    failed = KvFailed(
        request_id=decode.request_id,
        transfer_id=decode.transfer_id,
        error=Error(code=ErrorCode.INTERNAL, message="no more comes"),
        worker=PREFILL,
    )
    # The loop is held up until the next check is due: it and the message are then met in the same turn.
    time.sleep(1.2 * CHECK_S)  # noqa: ASYNC251
    taking = asyncio.create_task(run.transfer.take(failed))
    await right(pair, reader, loaded_tokens=0)
    await taking


async def test_an_older_failure_does_not_hurt_a_newer_attempt(pair: Cluster) -> None:
    gate = pair.prefill_engine.hold("prefill")
    prefill, decode = pair.halves(TOKENS)
    reader = await pair.listen(decode.reply)
    await pair.send_decode(decode)
    await pair.send_prefill(prefill)
    await until(lambda: pair.prefill_engine.at.get("prefill") == 1)
    await pair.send_prefill(msgspec.structs.replace(prefill, attempt=2))
    gate.set()
    await right(pair, reader, loaded_tokens=len(TOKENS) - 1)


async def test_repeated_halves_do_nothing(pair: Cluster) -> None:
    gate = pair.prefill_engine.hold("prefill")
    prefill, decode, reader = await pair.submit(TOKENS)
    for _ in range(2):
        assert (await pair.send_prefill(prefill)).request_id == prefill.request_id
        assert (await pair.send_decode(decode)).request_id == decode.request_id
    gate.set()
    await right(pair, reader, loaded_tokens=len(TOKENS) - 1)
    await pair.send_prefill(prefill)
    await pair.send_decode(decode)
    await pair.idle()
    assert len(reader.terminals) == 1
    assert len(pair.prefill_engine.prefilled) == len(pair.ended_of(Role.PREFILL)) == 1


async def test_a_new_attempt_that_comes_after_the_end_begins_nothing(pair: Cluster) -> None:
    """Its conductor names another prefill worker while decode, tired of waiting, computes and ends."""
    prefill, decode, reader = await pair.submit(TOKENS)
    await right(pair, reader, loaded_tokens=len(TOKENS) - 1)
    await pair.send_decode(msgspec.structs.replace(decode, attempt=2))
    await pair.send_prefill(msgspec.structs.replace(prefill, attempt=2))
    await pair.idle()
    assert len(reader.terminals) == 1
    assert len(pair.ended_of(Role.DECODE)) == 1


async def test_a_new_attempt_of_what_an_earlier_life_had_begins_nothing(pair: Cluster) -> None:
    _, decode = pair.halves(TOKENS, prefill_worker=None)
    reader = await pair.listen(decode.reply)
    await pair.send_decode(msgspec.structs.replace(decode, attempt=2))
    await pair.idle()
    assert reader.terminals == []


async def test_late_announcements_are_answered_so_that_leases_go(pair: Cluster) -> None:
    """Decode has ended by itself before prefill is done: prefill must not hold its KV for nobody."""
    gate = pair.prefill_engine.hold("prefill")
    prefill, decode = pair.halves(TOKENS, prefill_worker=None)
    reader = await pair.listen(decode.reply)
    await pair.send_decode(decode)
    await reader.finished()
    await pair.send_prefill(prefill)
    gate.set()
    await pair.idle()
    assert pair.ended_of(Role.PREFILL)[0].error is None


async def test_announcements_for_a_half_that_never_comes_are_answered(tmp_path: Path) -> None:
    async with cluster(tmp_path, decode_settings={"early_ttl_s": 0.1}) as pair:
        _, _, reader = await announced(pair)
        await pair.idle()
        assert len(pair.decode._early) == 0
        assert pair.ended_of(Role.PREFILL)[0].error is None
        assert reader.events == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_full_worker_says_busy_at_once(tmp_path: Path, role: str) -> None:
    settings: dict[str, object] = {"max_requests": 1, "max_queue": 1}
    async with cluster(tmp_path, decode_settings=settings, prefill_settings=settings) as pair:
        pair.prefill_engine.hold("prefill")
        pair.decode_engine.hold("decode")
        pairs = [pair.halves(TOKENS) for _ in range(3)]
        subject = subjects.split_prefill(PREFILL) if role == "prefill" else subjects.split_decode(DECODE)
        halves = [halves[role == "decode"] for halves in pairs]
        for half in halves[:2]:
            await call(pair.bus, subject, half, HalfAccepted, timeout_s=5)
        with pytest.raises(RemoteError) as refused:
            await call(pair.bus, subject, halves[2], HalfAccepted, timeout_s=5)
        assert refused.value.error.code is ErrorCode.BUSY
        assert refused.value.error.message == "the queue is full: 2 requests are here, 1 of them running"
        assert refused.value.error.retry_after_s == 0.5
        service = pair.prefill if role == "prefill" else pair.decode
        await until(lambda: service.heartbeat().num_waiting == 1)
        assert service.heartbeat().num_running == 1
        for half in halves[:2]:
            await pair.cancel(half.request_id)
        await pair.idle()


async def test_drain_finishes_what_runs_and_refuses_the_rest(pair: Cluster) -> None:
    gate = pair.decode_engine.hold("decode")
    _, _, reader = await pair.submit(TOKENS)
    await until(lambda: pair.decode_engine.at.get("decode") == 1)
    drains = [asyncio.create_task(service.drain()) for service in (pair.prefill, pair.decode)]
    await until(lambda: pair.decode.heartbeat().state is MemberState.DRAINING)
    prefill, decode = pair.halves(TOKENS)
    for subject, half in ((subjects.split_prefill(PREFILL), prefill), (subjects.split_decode(DECODE), decode)):
        with pytest.raises(RemoteError, match="draining") as refused:
            await call(pair.bus, subject, half, HalfAccepted, timeout_s=5)
        assert refused.value.error.code is ErrorCode.BUSY
    assert not drains[1].done()
    gate.set()
    await asyncio.wait_for(asyncio.gather(*drains), 5)
    await right(pair, reader, loaded_tokens=len(TOKENS) - 1)


async def test_stop_ends_what_runs_with_one_message(pair: Cluster) -> None:
    pair.decode_engine.hold("decode")
    _, _, reader = await pair.submit(TOKENS)
    await until(lambda: pair.decode_engine.at.get("decode") == 1)
    await pair.decode.stop()
    failed = await reader.failed()
    assert failed.error.code is ErrorCode.UNAVAILABLE
    await pair.decode.stop()
    assert len(reader.terminals) == 1


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"tokens": ()}, ErrorCode.INVALID_REQUEST),
        ({"tokens": (5, 402)}, ErrorCode.INVALID_REQUEST),
        ({"tokens": (5, -1)}, ErrorCode.INVALID_REQUEST),
        ({"tokens": tuple(prompt(1024))}, ErrorCode.PROMPT_TOO_LONG),
        ({"model": "other"}, ErrorCode.MODEL_NOT_FOUND),
    ],
)
async def test_what_can_never_be_served_is_refused(pair: Cluster, change: dict[str, object], code: ErrorCode) -> None:
    prefill, decode = pair.halves(TOKENS)
    for subject, half in ((subjects.split_prefill(PREFILL), prefill), (subjects.split_decode(DECODE), decode)):
        with pytest.raises(RemoteError) as refused:
            await call(pair.bus, subject, msgspec.structs.replace(half, **change), HalfAccepted, timeout_s=5)
        assert refused.value.error.code is code
    half = msgspec.structs.replace(decode, sampling=Sampling(max_tokens=1024))
    with pytest.raises(RemoteError, match="max_tokens is 1024; after a prompt of 29 tokens, at most 995 fit"):
        await call(pair.bus, subjects.split_decode(DECODE), half, HalfAccepted, timeout_s=5)


async def test_waiting_for_the_engine_ends_when_another_sequence_does(tmp_path: Path) -> None:
    engine = ExactEngine(total_tokens=40)
    async with cluster(tmp_path, decode_engine=engine) as pair:
        gate = engine.hold("decode")
        readers = [(await pair.submit(TOKENS))[2] for _ in range(3)]
        await until(lambda: engine.at.get("decode") == 1)
        assert engine.stats().running == 1
        gate.set()
        for reader in readers:
            await reader.finished()
            assert reader.tokens == EXPECTED
        await pair.idle()


async def test_undecodable_messages_change_nothing(pair: Cluster) -> None:
    for subject in (subjects.split_prefill(PREFILL), subjects.split_decode(DECODE), subjects.kv_ready(DECODE)):
        reply = await pair.bus.request(subject, b"\xc1 nonsense", timeout_s=5)
        assert b"invalid_message" in reply.data
    _, _, reader = await pair.submit(TOKENS)
    await right(pair, reader, loaded_tokens=len(TOKENS) - 1)


async def test_an_announcement_that_does_not_fit_means_recompute(pair: Cluster) -> None:
    gate = pair.prefill_engine.hold("prefill")
    _, decode, reader = await pair.submit(TOKENS)
    strange = KvReady(
        request_id=decode.request_id,
        transfer_id=decode.transfer_id,
        source=pair.node_a.source,
        chunks=(),
        num_chunks=9,
        cached_tokens=0,
    )
    await announce(pair.bus, subjects.kv_ready(DECODE), strange)
    await reader.finished()
    gate.set()
    await right(pair, reader, loaded_tokens=0)
