"""Admission and fair waiting in a real conductor, on both buses."""

import asyncio
import time
from functools import partial
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan

from halfmoon.bus.codec import encode
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import RequestId, TenantId, WorkerId
from halfmoon.schemas.requests import Finished, RequestSubmitted
from halfmoon.schemas.splits import Role
from halfmoon.schemas.wire import Error, ErrorCode
from support.conductors import BUSY, MODEL, PROMPT, FakeWorker, OpenStage, Stage
from support.wait import until


def request(name: str = "req-1", tenant: str = "t", **fields: Any) -> RequestSubmitted:
    return RequestSubmitted(request_id=RequestId(name), model=MODEL, tokens=PROMPT, tenant=TenantId(tenant), **fields)


def num_waiting(stage: Stage, conductor: int = 0) -> int:
    return stage.conductors[conductor].book.num_waiting


def is_waiting(stage: Stage, num: int) -> bool:
    return num_waiting(stage) == num


def is_running(decode: FakeWorker, name: str) -> bool:
    return RequestId(name) in decode.running


async def occupied(stage: Stage) -> FakeWorker:
    """The decode worker, which runs the one request that may be in flight."""
    await stage.client.submit(request("running"))
    decode = stage.workers["d1"]
    await until(partial(is_running, decode, "running"))
    return decode


async def submitted(stage: Stage, *requests: RequestSubmitted) -> None:
    """In this order, and all of them waiting."""
    for each in requests:
        before = num_waiting(stage)
        await stage.client.submit(each)
        await until(partial(is_waiting, stage, before + 1))


async def served_in_turn(decode: FakeWorker, num: int) -> list[str]:
    """Ends what runs, and so on, until so many more have begun; their ids in order."""
    order = []
    for _ in range(num):
        (running,) = decode.running
        await decode.end(running)
        await until(partial(has_changed, decode, running))
        order.append(str(next(iter(decode.running))))
    return order


def has_changed(decode: FakeWorker, before: RequestId) -> bool:
    return len(decode.running) == 1 and before not in decode.running


def refusal(stage: Stage, name: str) -> Error:
    (end,) = stage.client.ends(name)
    assert not isinstance(end, Finished)
    return end.error


async def spans(stage: Stage, *names: str) -> list[ReadableSpan]:
    """The first ones, in the order of their ends."""
    telemetry, memory = stage.conductors[0].telemetry, stage.spans[0]

    def found() -> list[ReadableSpan]:
        return [span for span in memory.get_finished_spans() if span.name in names]

    await until(lambda: telemetry.flush() and len(found()) >= len(names))
    return found()[: len(names)]


async def test_tenants_take_turns_and_batch_comes_after_interactive(open_stage: OpenStage) -> None:
    stage = await open_stage(max_in_flight=1)
    decode = await occupied(stage)
    await submitted(
        stage,
        request("batch-1", "loud", service_class="batch"),
        *(request(f"loud-{n}", "loud") for n in range(1, 4)),
        request("quiet-1", "quiet"),
        request("quiet-2", "quiet", priority=1),
    )
    assert [half.request_id for half in decode.decodes] == ["running"]
    # Interactive once, then batch, which is so far ahead of its sixteenth then that it has to wait.
    assert await served_in_turn(decode, 6) == ["loud-1", "batch-1", "quiet-2", "loud-2", "quiet-1", "loud-3"]
    priorities = {half.request_id: half.priority for half in decode.decodes}
    assert (priorities[RequestId("batch-1")], priorities[RequestId("quiet-2")]) == (-1, 1)
    assert {half.service_class for half in decode.decodes} == {None, "batch"}
    assert stage.value("halfmoon_conductor_wait_seconds_count", {"service_class": "interactive"}) == 5


async def test_what_waits_is_shown_by_class_and_tenant_and_as_a_span(open_stage: OpenStage) -> None:
    stage = await open_stage(max_in_flight=1)
    decode = await occupied(stage)
    await submitted(stage, request("a", "acme"), request("b", "acme"), request("c", "acme", service_class="batch"))
    labels = {"service_class": "interactive", "tenant": "acme"}
    await until(lambda: stage.value("halfmoon_conductor_waiting", labels) == 2)
    await served_in_turn(decode, 1)
    _, wait, schedule = await spans(stage, "conductor.schedule", "conductor.wait", "conductor.schedule")
    assert (wait.name, schedule.name) == ("conductor.wait", "conductor.schedule")
    assert schedule.context is not None
    assert wait.parent is not None
    assert wait.parent.span_id == schedule.context.span_id
    assert schedule.attributes is not None
    assert schedule.attributes["halfmoon.service_class"] == "interactive"


async def test_a_request_waits_for_a_worker_with_room(open_stage: OpenStage) -> None:
    stage = await open_stage(max_waiting_per_worker=8)
    prefill = stage.workers["p1"]
    prefill.num_waiting = 8
    await prefill.beat()
    await until(lambda: any(load.num_waiting == 8 for load in stage.conductors[0].members.cluster().workers))
    await submitted(stage, request())
    prefill.num_waiting = 7
    await until(lambda: bool(prefill.running))
    assert stage.client.events == []


async def test_a_request_waits_while_its_workers_say_that_they_are_busy(open_stage: OpenStage) -> None:
    stage = await open_stage()
    decode = stage.workers["d1"]
    decode.answer = BUSY
    await stage.client.submit(request())
    await until(lambda: len(decode.decodes) >= 2)
    assert stage.workers["p1"].prefills == []
    decode.answer = None
    await until(lambda: bool(decode.running))
    await decode.end(RequestId("req-1"))
    await until(lambda: len(stage.client.ends()) == 1)
    assert isinstance(stage.client.ends()[0], Finished)


async def test_what_waits_can_be_cancelled_and_the_next_moves_up(open_stage: OpenStage) -> None:
    stage = await open_stage(max_in_flight=1)
    decode = await occupied(stage)
    await submitted(stage, request("a"), request("b"), request("c"))
    await stage.client.cancel(RequestId("a"))
    await until(lambda: bool(stage.client.ends("a")))
    assert refusal(stage, "a").code is ErrorCode.CANCELLED
    assert await served_in_turn(decode, 2) == ["b", "c"]
    assert len(stage.client.ends()) == 3


async def test_nothing_waits_past_its_deadline_and_then_nothing_runs(open_stage: OpenStage) -> None:
    stage = await open_stage(max_in_flight=1)
    decode = await occupied(stage)
    await submitted(stage, request("late", deadline_ns=time.time_ns() + 1_000_000_000), request("next"))
    await until(lambda: bool(stage.client.ends("late")))
    assert refusal(stage, "late").code is ErrorCode.DEADLINE
    assert await served_in_turn(decode, 1) == ["next"]
    assert [half.request_id for half in decode.decodes] == ["running", "next"]
    assert all(half.request_id != "late" for half in stage.workers["p1"].prefills)
    rejected = {"reason": "deadline", "service_class": "interactive"}
    assert stage.value("halfmoon_conductor_rejections_total", rejected) == 1


async def test_nothing_waits_longer_than_its_class_may(open_stage: OpenStage) -> None:
    classes = {"interactive": {"ttft_s": 1.0}}
    stage = await open_stage(max_in_flight=1, classes=classes)
    decode = await occupied(stage)
    await submitted(stage, request("patient", service_class="batch"), request("hasty"))
    await until(lambda: bool(stage.client.ends("hasty")))
    error = refusal(stage, "hasty")
    assert error.code is ErrorCode.OVERLOADED
    assert "class 'interactive' allows 1 s" in error.message
    assert error.retry_after_s is not None
    assert error.retry_after_s > 0.0
    assert await served_in_turn(decode, 1) == ["patient"]


async def test_a_first_token_that_would_be_late_is_refused_before_anybody_works(open_stage: OpenStage) -> None:
    # 40 tokens at 10 a second: four seconds.
    classes = {"interactive": {"ttft_s": 3.0}}
    stage = await open_stage(classes=classes, assumed_prefill_tokens_per_s=10.0)
    await stage.client.submit(request())
    await until(lambda: bool(stage.client.events))
    error = stage.client.failure()
    assert error.code is ErrorCode.OVERLOADED
    assert "the time to first token would be" in error.message
    assert error.retry_after_s == pytest.approx(1.0, abs=0.5)
    assert stage.workers["d1"].decodes == []
    assert stage.workers["p1"].prefills == []
    rejected = {"reason": "ttft", "service_class": "interactive"}
    assert stage.value("halfmoon_conductor_rejections_total", rejected) == 1
    attributes = (await spans(stage, "conductor.schedule"))[0].attributes or {}
    assert attributes["halfmoon.admission.limit"] == "ttft"
    assert attributes["halfmoon.admission.limit_s"] == 3.0
    # A class that promises nothing takes it.
    await stage.client.submit(request("batch", service_class="batch"))
    await until(lambda: bool(stage.workers["d1"].running))


@pytest.mark.parametrize("admission", ["none", "early", "predictive"])
async def test_early_counts_what_runs_predictive_what_will_and_none_nothing(
    open_stage: OpenStage, admission: str
) -> None:
    # Nobody has measured: a batch of n takes 30 ms × (1 + (n - 1) / 20); two requests keep 32 ms, three do not.
    classes = {"interactive": {"tbt_s": 0.032}}
    stage = await open_stage(classes=classes, admission=admission)
    decode = stage.workers["d1"]
    outlook = stage.conductors[0].book.outlook
    for name in ("a", "b"):
        await stage.client.submit(request(name))
        await until(partial(is_running, decode, name))

    # Both are placed, neither has begun to generate; but each was expected to, by now.
    def expected() -> float:
        now_s = time.monotonic()
        return outlook.at(WorkerId("d1"), now_s, now_s).num_requests

    await until(lambda: expected() == 2)
    await stage.client.submit(request("c"))
    await until(lambda: bool(RequestId("c") in decode.running or stage.client.ends("c")))
    assert (RequestId("c") in decode.running) == (admission != "predictive")
    for name in ("a", "b"):
        await decode.generate(RequestId(name), 7)
    await until(lambda: outlook.now(WorkerId("d1")).num_requests == 2)
    await stage.client.submit(request("d"))
    await until(lambda: bool(RequestId("d") in decode.running or stage.client.ends("d")))
    assert (RequestId("d") in decode.running) == (admission == "none")
    if admission != "none":
        assert "time between tokens would be 0.033 s" in refusal(stage, "d").message


async def test_where_too_many_wait_whoever_has_most_is_turned_away(open_stage: OpenStage) -> None:
    stage = await open_stage(max_in_flight=1, max_waiting=3)
    decode = await occupied(stage)
    await submitted(stage, *(request(f"flood-{n}", "flood") for n in range(3)))
    await stage.client.submit(request("quiet", "quiet"))
    await until(lambda: bool(stage.client.ends("flood-2")))
    error = refusal(stage, "flood-2")
    assert error.code is ErrorCode.OVERLOADED
    assert error.retry_after_s is not None
    assert stage.value("halfmoon_conductor_rejections_total", {"reason": "full", "service_class": "interactive"}) == 1
    assert await served_in_turn(decode, 3) == ["flood-0", "quiet", "flood-1"]


async def test_what_waits_in_a_conductor_that_dies_is_served_by_another(open_stage: OpenStage) -> None:
    stage = await open_stage(max_in_flight=1)
    decode = await occupied(stage)
    await submitted(stage, request("a"), request("b"))
    await stage.conductors[0].stop()
    second = await stage.add_conductor("conductor-2", max_in_flight=8)
    await until(lambda: {RequestId("a"), RequestId("b")} <= set(decode.running))
    for name in ("running", "a", "b"):
        await decode.end(RequestId(name))
    await until(lambda: len(second.requests) == 0)
    assert sorted(end.request_id for end in stage.client.ends()) == ["a", "b", "running"]


async def test_a_conductor_that_drains_hands_back_what_waits_at_once(open_stage: OpenStage) -> None:
    stage = await open_stage(max_in_flight=1, drain_timeout_s=20.0)
    decode = await occupied(stage)
    await submitted(stage, request("a"), request("b"))
    second = await stage.add_conductor("conductor-2", max_in_flight=8)
    async with asyncio.TaskGroup() as group:
        group.create_task(stage.conductors[0].drain())
        await until(lambda: {RequestId("a"), RequestId("b")} <= set(decode.running))
        assert num_waiting(stage) == 0
        for name in ("running", "a", "b"):
            await decode.end(RequestId(name))
    await until(lambda: len(second.requests) == 0)
    assert sorted(end.request_id for end in stage.client.ends()) == ["a", "b", "running"]


async def test_what_another_conductor_serves_a_tenant_counts_here(open_stage: OpenStage) -> None:
    stage = await open_stage(max_in_flight=1)
    decode = await occupied(stage)
    await submitted(stage, request("a-1", "a"), request("a-2", "a"), request("b-1", "b"), request("b-2", "b"))
    half = msgspec.structs.replace(
        decode.decodes[0],
        request_id=RequestId("elsewhere"),
        tenant=TenantId("a"),
        conductor=WorkerId("conductor-2"),
        tokens=(*PROMPT, *PROMPT, 1),
    )
    await stage.client.bus.publish(subjects.split_decode(WorkerId("d9")), encode(half))
    await until(lambda: len(stage.conductors[0].book.outlook) == 2)
    # Without it `a-1` would go first: it came first.
    assert await served_in_turn(decode, 4) == ["b-1", "b-2", "a-1", "a-2"]


async def test_a_class_that_nobody_has_set_up_is_refused_with_those_there_are(open_stage: OpenStage) -> None:
    stage = await open_stage()
    await stage.client.submit(request(service_class="gold"))
    await until(lambda: bool(stage.client.events))
    error = stage.client.failure()
    assert error.code is ErrorCode.INVALID_REQUEST
    assert error.message == "no class of service 'gold'; there is batch, interactive"
    assert stage.workers["d1"].decodes == []


async def test_a_request_whose_worker_is_lost_waits_for_nobody(open_stage: OpenStage) -> None:
    stage = await open_stage(max_waiting_per_worker=1)
    await stage.client.submit(request())
    await until(lambda: bool(stage.workers["d1"].running))
    second = await stage.add_worker("d2", Role.DECODE, "node-b", num_waiting=1)
    await until(lambda: stage.conductors[0].members.life_of(WorkerId("d2")) is not None)
    await stage.workers["d1"].leave()
    await until(lambda: bool(second.running))
    now_s = time.monotonic()
    assert stage.conductors[0].book.outlook.at(WorkerId("d1"), now_s, now_s).num_requests == 0
