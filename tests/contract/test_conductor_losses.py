"""Workers and conductors that go away, on both buses: what they had goes on elsewhere, or is told to have failed."""

import time

import pytest

from halfmoon.bus.codec import encode
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import RequestId, WorkerId
from halfmoon.schemas.members import Goodbye, MemberState
from halfmoon.schemas.requests import Failed, Finished, Sampling
from halfmoon.schemas.splits import Role, TransferDone
from halfmoon.schemas.wire import ErrorCode
from support.conductors import OpenStage, request
from support.wait import until, until_awaited


async def test_a_lost_prefill_worker_is_replaced(open_stage: OpenStage) -> None:
    stage = await open_stage()
    decode = stage.workers["d1"]
    await stage.client.submit(request())
    await until(lambda: bool(stage.workers["p1"].running))
    second = await stage.add_worker("p2", Role.PREFILL, "node-a")
    await until(lambda: stage.conductors[0].members.life_of(WorkerId("p2")) is not None)
    await stage.workers["p1"].leave()
    await until(lambda: bool(second.prefills and decode.decodes[1:]))
    half = second.prefills[0]
    assert half.transfer_id == decode.decodes[0].transfer_id
    assert half.attempt == 2
    assert (decode.decodes[-1].prefill_worker, decode.decodes[-1].attempt) == ("p2", 2)
    await second.leave()
    await until(lambda: bool(decode.kv_failed))
    assert decode.kv_failed[0].error.code in (ErrorCode.NO_WORKERS, ErrorCode.WORKER_LOST)


async def test_a_prefill_worker_that_is_done_may_go(open_stage: OpenStage) -> None:
    stage = await open_stage()
    decode, prefill = stage.workers["d1"], stage.workers["p1"]
    await stage.client.submit(request())
    await until(lambda: bool(prefill.running and decode.running))
    done = TransferDone(request_id=RequestId("req-1"), transfer_id=decode.decodes[0].transfer_id)
    await decode.bus.publish(subjects.split_prefill(prefill.worker), encode(done))
    conductor = stage.conductors[0]
    open_request = conductor.requests.get(RequestId("req-1"))
    assert open_request is not None
    await until(lambda: open_request.prefill_worker is None)
    await prefill.leave()
    await until(lambda: conductor.members.life_of(prefill.worker) is None)
    await decode.end(RequestId("req-1"))
    await until(lambda: len(conductor.requests) == 0)
    assert decode.kv_failed == []


async def test_a_lost_decode_worker_is_resumed_from_the_tokens_it_told_of(open_stage: OpenStage) -> None:
    stage = await open_stage()
    first, prefill = stage.workers["d1"], stage.workers["p1"]
    first.cached_tokens = 8
    await stage.client.submit(request(sampling=Sampling(max_tokens=9)))
    await until(lambda: bool(first.running))
    await first.generate(RequestId("req-1"), 11, 12, 13)
    conductor = stage.conductors[0]
    await until(lambda: conductor.flights.known(RequestId("req-1")) == (11, 12, 13))
    second = await stage.add_worker("d2", Role.DECODE, "node-b")
    await until(lambda: conductor.members.life_of(WorkerId("d2")) is not None)
    await first.leave()
    await until(lambda: len(prefill.prefills) == 2 and bool(second.decodes and prefill.transfers_done))
    half, before = second.decodes[0], first.decodes[0]
    assert half.known == (11, 12, 13)
    assert half.cached_tokens == 8
    assert prefill.transfers_done == [before.transfer_id]
    assert (half.seed, half.tokens, half.sampling) == (before.seed, before.tokens, before.sampling)
    assert half.transfer_id != before.transfer_id
    assert prefill.prefills[-1].transfer_id == half.transfer_id
    await second.end(RequestId("req-1"))
    await until(lambda: len(conductor.requests) == 0)


@pytest.mark.parametrize("is_silent", [False, True])
async def test_a_lost_decode_worker_that_nobody_replaces_fails_its_request(
    open_stage: OpenStage, is_silent: bool
) -> None:
    stage = await open_stage()
    decode = stage.workers["d1"]
    await stage.client.submit(request())
    await until(lambda: bool(decode.running))
    await (decode.die() if is_silent else decode.leave())
    await until(lambda: bool(stage.client.events))
    assert stage.client.failure().code is ErrorCode.WORKER_LOST
    await until(lambda: len(stage.conductors[0].requests) == 0)
    # Nobody reads what prefill has made: it need not hold it.
    await until(lambda: stage.workers["p1"].transfers_done == [decode.decodes[0].transfer_id])


async def test_a_decode_worker_that_only_stood_still_learns_that_nobody_waits_any_more(open_stage: OpenStage) -> None:
    stage = await open_stage()
    decode = stage.workers["d1"]
    await stage.client.submit(request())
    await until(lambda: bool(decode.running))
    await decode.stop_beating()
    await decode.bus.publish(subjects.heartbeat(decode.worker), encode(Goodbye(worker=decode.worker)))
    await until(lambda: decode.cancels == [RequestId("req-1")])
    # The client has been told before.
    end = stage.client.ends()[0]
    assert isinstance(end, Failed)
    assert end.error.code is ErrorCode.WORKER_LOST


async def test_a_half_that_was_never_heard_goes_to_another(open_stage: OpenStage) -> None:
    stage = await open_stage()
    stage.workers["d1"].is_silent = True
    await stage.client.submit(request())
    await until(lambda: bool(stage.workers["d1"].decodes))
    await stage.add_worker("d2", Role.DECODE, "node-b", finishes=True)
    await stage.workers["d1"].leave()
    await until(lambda: len(stage.client.ends()) == 1)
    assert isinstance(stage.client.ends()[0], Finished)


async def test_an_end_that_was_not_heard_is_concluded_and_not_told_again(open_stage: OpenStage) -> None:
    stage = await open_stage()
    decode = stage.workers["d1"]
    await stage.client.submit(request())
    await until(lambda: bool(decode.running))
    await decode.end(RequestId("req-1"), tells_conductor=False)
    await until(lambda: len(stage.conductors[0].requests) == 0)
    assert len(stage.client.ends()) == 1


async def test_a_worker_that_dies_between_an_end_and_telling_it_has_ended_the_request(open_stage: OpenStage) -> None:
    stage = await open_stage()
    decode = stage.workers["d1"]
    second = await stage.add_worker("d2", Role.DECODE, "node-b")
    await until(lambda: stage.conductors[0].members.life_of(second.worker) is not None)
    await stage.client.submit(request())
    await until(lambda: bool(decode.running or second.running))
    has_it = decode if decode.running else second
    await has_it.end(RequestId("req-1"), tells_conductor=False)
    await has_it.leave()
    await until(lambda: len(stage.conductors[0].requests) == 0)
    assert len(stage.client.ends()) == len(decode.decodes) + len(second.decodes) == 1


async def test_another_conductor_adopts_what_still_runs(open_stage: OpenStage) -> None:
    stage = await open_stage()
    decode = stage.workers["d1"]
    await stage.client.submit(request())
    await until(lambda: bool(decode.running))
    await stage.conductors[0].stop()
    second = await stage.add_conductor("conductor-2")
    await until(lambda: len(second.requests) == 1)
    await until(lambda: stage.value("halfmoon_conductor_adopted_total", conductor=1) == 1)
    assert len(decode.decodes) == 1
    await decode.end(RequestId("req-1"))
    await until(lambda: len(second.requests) == 0)
    assert len(stage.client.ends()) == 1


async def test_of_two_that_run_it_the_one_is_adopted_that_it_was_given_last(open_stage: OpenStage) -> None:
    stage = await open_stage()
    first = stage.workers["d1"]
    await stage.client.submit(request())
    await until(lambda: bool(first.running))
    other = await stage.add_conductor("conductor-2")
    second = await stage.add_worker("d2", Role.DECODE, "node-b")
    await until(lambda: all(each.members.life_of(second.worker) is not None for each in stage.conductors))
    await first.stop_beating()
    await first.bus.publish(subjects.heartbeat(first.worker), encode(Goodbye(worker=first.worker)))
    await until(lambda: bool(second.running))
    await stage.conductors[0].stop()

    async def is_adopted() -> bool:
        await first.beat()  # it only stood still, and is there again
        return stage.value("halfmoon_conductor_adopted_total", conductor=1) == 1

    await until_awaited(is_adopted)
    adopted = other.requests.get(RequestId("req-1"))
    assert adopted is not None
    assert (adopted.decode_worker, adopted.transfer_id) == (second.worker, second.decodes[0].transfer_id)
    await second.end(RequestId("req-1"))
    await until(lambda: len(other.requests) == 0)


async def test_another_conductor_places_what_does_not_run(open_stage: OpenStage) -> None:
    stage = await open_stage()
    await stage.client.submit(request())
    await until(lambda: bool(stage.workers["d1"].running))
    await stage.conductors[0].stop()
    await stage.workers["d1"].leave()
    await stage.add_worker("d2", Role.DECODE, "node-b", finishes=True)
    second = await stage.add_conductor("conductor-2")
    await until(lambda: len(stage.client.ends()) == 1)
    await until(lambda: len(second.requests) == 0)
    assert isinstance(stage.client.ends()[0], Finished)
    seeds = {half.seed for worker in ("d1", "d2") for half in stage.workers[worker].decodes}
    assert len(seeds) == 1


async def test_a_conductor_that_drains_hands_back_what_takes_too_long(open_stage: OpenStage) -> None:
    stage = await open_stage()
    decode = stage.workers["d1"]
    await stage.client.submit(request())
    await until(lambda: bool(decode.running))
    second = await stage.add_conductor("conductor-2", ack_wait_s=30.0)
    await stage.conductors[0].drain()
    assert stage.conductors[0].heartbeat().state is MemberState.DRAINING
    assert len(stage.conductors[0].requests) == 0
    await until(lambda: len(second.requests) == 1)
    await decode.end(RequestId("req-1"))
    await until(lambda: len(second.requests) == 0)
    assert len(stage.client.ends()) == 1
    assert len(decode.decodes) == 1


async def test_while_it_lives_a_request_is_not_delivered_again(open_stage: OpenStage) -> None:
    stage = await open_stage(ack_wait_s=0.6)
    decode = stage.workers["d1"]
    await stage.client.submit(request())
    await until(lambda: bool(decode.running))
    begun = time.monotonic()
    await until(lambda: time.monotonic() - begun > 1.5)
    open_request = stage.conductors[0].requests.get(RequestId("req-1"))
    assert open_request is not None
    assert open_request.delivery.num_delivered == 1
    await decode.end(RequestId("req-1"))
    await until(lambda: len(stage.conductors[0].requests) == 0)
