"""The conductor on both buses: every way in, and every way out."""

import json
import time
from typing import Any

import msgspec
import pytest

from halfmoon.bus.codec import encode
from halfmoon.bus.protocol import BusMessage
from halfmoon.chunks.keys import Namespace, chunk_keys
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import RequestId
from halfmoon.schemas.members import MemberState
from halfmoon.schemas.requests import Encoding, Failed, Finished, Sampling, TokenEvent
from halfmoon.schemas.splits import DecodeHalf, PrefillHalf, Role
from halfmoon.schemas.wire import HEADER_DEADLINE, ErrorCode
from halfmoon.tracing.context import HEADER_TRACEPARENT
from support.conductors import BUSY, CARD, MODEL, PROMPT, SPLIT_PAIR, OpenStage, request
from support.wait import until, until_awaited


async def test_both_halves_go_out_and_the_request_is_acked_when_decode_has_ended_it(open_stage: OpenStage) -> None:
    stage = await open_stage()
    prefill, decode = stage.workers["p1"], stage.workers["d1"]
    deadline_ns = time.time_ns() + 30_000_000_000
    await stage.client.submit(request(deadline_ns=deadline_ns, sampling=Sampling(max_tokens=5, seed=3)))
    await until(lambda: bool(decode.running and prefill.running))

    half, other = decode.decodes[0], prefill.prefills[0]
    assert half.transfer_id == other.transfer_id
    assert half.tokens == other.tokens == PROMPT
    assert half.root == other.root == Namespace.of(CARD, tenant_salt="default").root()
    assert (half.prefill_worker, other.decode_worker) == ("p1", "d1")
    assert (half.sampling.max_tokens, half.seed, half.reply) == (5, 3, stage.client.reply)
    assert half.deadline_ns == other.deadline_ns == deadline_ns
    assert other.reuse == ()
    conductor = stage.conductors[0]
    assert len(conductor.requests) == 1

    await decode.generate(RequestId("req-1"), 7)
    await decode.end(RequestId("req-1"))
    await until(lambda: len(conductor.requests) == 0)
    assert [type(event).__name__ for event in stage.client.events] == ["Tokens", "Finished"]
    assert stage.value("halfmoon_conductor_requests_total", {"outcome": "finished"}) == 1


async def test_a_short_prompt_needs_no_prefill(open_stage: OpenStage) -> None:
    stage = await open_stage()
    stage.workers["d1"].finishes = True
    await stage.client.submit(request(tokens=(5,)))
    await until(lambda: len(stage.client.ends()) == 1)
    assert stage.workers["d1"].decodes[0].prefill_worker is None
    assert stage.workers["p1"].prefills == []


async def test_a_colocated_worker_gets_one_half(open_stage: OpenStage) -> None:
    stage = await open_stage(("c1", Role.COLOCATED, "node-a"))
    stage.workers["c1"].finishes = True
    await stage.client.submit(request())
    await until(lambda: len(stage.client.ends()) == 1)
    assert stage.workers["c1"].decodes[0].prefill_worker is None


async def test_json_in_and_json_out(open_stage: OpenStage) -> None:
    stage = await open_stage()
    stage.workers["d1"].finishes = True
    body = {"tokens": list(PROMPT), "sampling": {"max_tokens": 2}}
    await stage.client.submit_raw(json.dumps(body).encode())
    await until(lambda: len(stage.client.ends()) == 1)
    half = stage.workers["d1"].decodes[0]
    assert half.encoding is Encoding.JSON
    assert half.model == MODEL  # from the subject
    assert half.request_id.startswith("req-")
    assert json.loads(stage.client.raw[-1])["type"] == "finished.v1"


async def test_a_plain_nats_request_is_answered_on_its_own_reply_subject(open_stage: OpenStage) -> None:
    stage = await open_stage()
    stage.workers["d1"].finishes = True
    events: list[dict[str, Any]] = []

    async def hear(message: BusMessage) -> None:
        events.append(json.loads(message.data))

    bus = stage.client.bus
    inbox = bus.new_inbox()
    await bus.subscribe(inbox, hear)
    await bus.publish(subjects.generate(MODEL), json.dumps({"tokens": [1, 2, 3]}).encode(), reply=inbox)
    await until(lambda: len(events) == 2)
    assert [event["type"] for event in events] == ["tokens.v1", "finished.v1"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{not json", ErrorCode.INVALID_MESSAGE),
        (b'{"tokens": [1], "prompt": "both"}', ErrorCode.INVALID_MESSAGE),
        (b'{"tokens": [1], "sampling": {"temperature": 7}}', ErrorCode.INVALID_MESSAGE),
        (b'{"type": "no.such.v1"}', ErrorCode.INVALID_MESSAGE),
        (b"\xc1\xff", ErrorCode.INVALID_MESSAGE),
        (b'{"tokens": []}', ErrorCode.INVALID_REQUEST),
        (b'{"tokens": [1000]}', ErrorCode.INVALID_REQUEST),
        (b'{"tokens": [-1]}', ErrorCode.INVALID_REQUEST),
        (b'{"prompt": "hello"}', ErrorCode.INVALID_REQUEST),
        (b'{"tokens": [1], "model": "other"}', ErrorCode.MODEL_NOT_FOUND),
        (json.dumps({"tokens": [1] * 256}).encode(), ErrorCode.PROMPT_TOO_LONG),
    ],
)
async def test_what_cannot_be_served_is_refused_once_and_no_worker_hears_of_it(
    open_stage: OpenStage, body: bytes, code: ErrorCode
) -> None:
    stage = await open_stage(ack_wait_s=30.0)
    await stage.client.submit_raw(body)
    await until(lambda: bool(stage.client.events))
    assert stage.client.failure().code is code
    assert stage.client.raw[0].startswith(b"{") == body.startswith(b"{")
    # What follows is served: nothing is stuck, and nothing was delivered again.
    stage.workers["d1"].finishes = True
    await stage.client.submit(request("req-after"))
    await until(lambda: len(stage.client.ends()) == 2)
    assert len(stage.workers["d1"].decodes) == 1


async def test_an_unknown_model_is_told_which_there_are(open_stage: OpenStage) -> None:
    stage = await open_stage()
    await stage.client.submit(msgspec.structs.replace(request(), model="nowhere/model-9"))
    await until(lambda: bool(stage.client.events))
    error = stage.client.failure()
    assert error.code is ErrorCode.MODEL_NOT_FOUND
    assert "'tiny'" in error.message


async def test_without_a_reply_subject_a_request_is_dropped_and_counted(open_stage: OpenStage) -> None:
    stage = await open_stage()
    stage.workers["d1"].finishes = True
    await stage.client.bus.stream_publish(subjects.request(MODEL), encode(request()))
    await stage.client.submit(request("req-2"))
    await until(lambda: len(stage.client.ends()) == 1)
    await until(lambda: stage.value("halfmoon_conductor_no_reply_total") == 1)
    assert [half.request_id for half in stage.workers["d1"].decodes] == ["req-2"]


async def test_the_reply_subject_may_be_a_field(open_stage: OpenStage) -> None:
    stage = await open_stage()
    stage.workers["d1"].finishes = True
    body = encode(request(reply=stage.client.reply))
    await stage.client.bus.stream_publish(subjects.request(MODEL), body)
    await until(lambda: len(stage.client.ends()) == 1)


async def test_no_prefill_worker_is_told_at_once_and_decode_hears_nothing(open_stage: OpenStage) -> None:
    stage = await open_stage(("d1", Role.DECODE, "node-b"))
    await stage.client.submit(request())
    await until(lambda: bool(stage.client.events))
    error = stage.client.failure()
    assert error.code is ErrorCode.NO_WORKERS
    assert error.retry_after_s is not None
    assert "prefill" in error.message
    assert stage.workers["d1"].decodes == []


@pytest.mark.parametrize("state", [MemberState.LOADING, MemberState.DRAINING])
async def test_workers_that_load_or_drain_are_no_candidates(open_stage: OpenStage, state: MemberState) -> None:
    stage = await open_stage(("p1", Role.PREFILL, "node-a"), conductor=False)
    await stage.add_worker("d1", Role.DECODE, "node-b", state=state)
    await stage.add_conductor()
    await stage.client.submit(request())
    await until(lambda: bool(stage.client.events))
    assert stage.client.failure().code is ErrorCode.NO_WORKERS
    assert stage.workers["d1"].decodes == []


async def test_workers_with_other_kv_are_not_paired(open_stage: OpenStage) -> None:
    stage = await open_stage(("p1", Role.PREFILL, "node-a"), conductor=False)
    other = msgspec.structs.replace(CARD, kv_dtype="bfloat16")
    await stage.add_worker("d1", Role.DECODE, "node-b", card=other)
    await stage.add_conductor()
    await stage.client.submit(request())
    await until(lambda: bool(stage.client.events))
    assert stage.client.failure().code is ErrorCode.NO_WORKERS


async def test_a_busy_decode_worker_is_passed_over(open_stage: OpenStage) -> None:
    stage = await open_stage(*SPLIT_PAIR, ("d2", Role.DECODE, "node-b"))
    first, second = stage.workers["d1"], stage.workers["d2"]
    first.answer = BUSY
    second.finishes = True
    for number in range(4):
        await stage.client.submit(request(f"req-{number}"))
    await until(lambda: len(stage.client.ends()) == 4)
    assert all(isinstance(end, Finished) for end in stage.client.ends())
    assert len(second.decodes) == 4


async def test_when_all_decode_workers_are_busy_and_nobody_may_wait_the_client_is_turned_away(
    open_stage: OpenStage,
) -> None:
    stage = await open_stage(max_waiting=0)
    stage.workers["d1"].answer = BUSY
    await stage.client.submit(request())
    await until(lambda: bool(stage.client.events))
    error = stage.client.failure()
    assert error.code is ErrorCode.OVERLOADED
    assert error.retry_after_s is not None
    assert stage.workers["p1"].prefills == []


async def test_long_queues_are_not_lengthened(open_stage: OpenStage) -> None:
    stage = await open_stage(max_waiting_per_worker=8, max_waiting=0)
    stage.workers["p1"].num_waiting = 8
    await stage.workers["p1"].beat()
    await until(
        lambda: all(w.num_waiting == 8 for w in stage.conductors[0].members.cluster().workers if w.worker == "p1")
    )
    await stage.client.submit(request())
    await until(lambda: bool(stage.client.events))
    assert stage.client.failure().code is ErrorCode.OVERLOADED
    assert stage.workers["d1"].decodes == []


async def test_a_busy_prefill_worker_is_passed_over_and_decode_told(open_stage: OpenStage) -> None:
    stage = await open_stage(*SPLIT_PAIR, ("p2", Role.PREFILL, "node-a"))
    stage.workers["p1"].answer = BUSY
    decode = stage.workers["d1"]
    for number in range(4):
        await stage.client.submit(request(f"req-{number}"))
    await until(lambda: len(stage.workers["p2"].running) == 4)

    def told(half: PrefillHalf) -> DecodeHalf:
        return [each for each in decode.decodes if each.request_id == half.request_id][-1]

    for half in stage.workers["p2"].prefills:
        await until(lambda half=half: told(half).prefill_worker == "p2")  # type: ignore[misc]
        assert (told(half).transfer_id, told(half).attempt) == (half.transfer_id, half.attempt)


async def test_when_no_prefill_worker_takes_it_decode_computes(open_stage: OpenStage) -> None:
    stage = await open_stage()
    stage.workers["p1"].answer = BUSY
    decode = stage.workers["d1"]
    await stage.client.submit(request())
    await until(lambda: bool(decode.kv_failed))
    assert decode.kv_failed[0].transfer_id == decode.decodes[0].transfer_id
    await decode.end(RequestId("req-1"))
    await until(lambda: len(stage.conductors[0].requests) == 0)
    assert len(stage.client.ends()) == 1


async def test_a_prompt_leaves_its_completion_what_room_there_is(open_stage: OpenStage) -> None:
    stage = await open_stage()
    await stage.client.submit(request(tokens=(1,) * 250, sampling=Sampling(max_tokens=100)))
    await until(lambda: bool(stage.workers["d1"].decodes))
    assert stage.workers["d1"].decodes[0].sampling.max_tokens == 6


async def test_a_deadline_that_has_passed_costs_no_work(open_stage: OpenStage) -> None:
    stage = await open_stage()
    await stage.client.submit(request(), headers={HEADER_DEADLINE: str(time.time_ns() - 1)})
    await until(lambda: bool(stage.client.events))
    assert stage.client.failure().code is ErrorCode.DEADLINE
    assert stage.workers["d1"].decodes == []


async def test_a_decode_worker_that_never_ends_is_cancelled_past_the_deadline(open_stage: OpenStage) -> None:
    stage = await open_stage()
    await stage.client.submit(request(deadline_ns=time.time_ns() + 300_000_000))
    await until(lambda: bool(stage.client.ends()))
    # The fake ends what it is told to cancel, so that end is the only one.
    assert stage.client.failure().code is ErrorCode.CANCELLED
    await until(lambda: len(stage.conductors[0].requests) == 0)
    await until(lambda: stage.workers["p1"].cancels == ["req-1"])
    assert len(stage.client.ends()) == 1


async def test_cancel_reaches_both_workers_also_when_it_was_sent_first(open_stage: OpenStage) -> None:
    stage = await open_stage()
    await stage.client.submit(request())
    await until(lambda: bool(stage.workers["d1"].running and stage.workers["p1"].running))
    await stage.client.cancel(RequestId("req-1"))
    await until(lambda: bool(stage.client.ends()))
    await until(lambda: len(stage.conductors[0].requests) == 0)
    assert stage.client.failure().code is ErrorCode.CANCELLED

    await stage.client.cancel(RequestId("req-2"))
    await until(lambda: stage.conductors[0].requests.is_cancelled(RequestId("req-2")))
    await stage.client.submit(request("req-2"))
    await until(lambda: bool(stage.client.ends("req-2")))
    assert [half.request_id for half in stage.workers["d1"].decodes] == ["req-1"]


async def test_the_trace_goes_on_in_both_halves(open_stage: OpenStage) -> None:
    stage = await open_stage()
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    await stage.client.submit(request(), headers={HEADER_TRACEPARENT: parent})
    await until(lambda: bool(stage.workers["p1"].headers and stage.workers["d1"].headers))
    for worker in ("p1", "d1"):
        assert stage.workers[worker].headers[0][HEADER_TRACEPARENT] == parent
    telemetry = stage.conductors[0].telemetry
    # The span ends when both workers have answered, a moment after they heard.
    await until(lambda: telemetry.flush() and bool(stage.spans[0].get_finished_spans()))
    (schedule,) = stage.spans[0].get_finished_spans()
    assert schedule.name == "conductor.schedule"
    assert schedule.parent is not None
    assert schedule.attributes is not None
    assert schedule.attributes["halfmoon.schedule.decode_worker"] == "d1"
    assert schedule.attributes["halfmoon.schedule.prefill_worker"] == "p1"
    assert schedule.attributes["halfmoon.schedule.matched_chunks"] == 0

    await stage.client.submit(request("req-2"))
    await until(lambda: all(len(stage.workers[worker].headers) == 2 for worker in ("p1", "d1")))
    headers = stage.workers["d1"].headers[-1]
    assert headers[HEADER_TRACEPARENT].split("-")[1] != "a" * 32
    assert headers[HEADER_TRACEPARENT] == stage.workers["p1"].headers[-1][HEADER_TRACEPARENT]


async def test_tenants_share_only_where_they_share_a_salt(open_stage: OpenStage) -> None:
    stage = await open_stage(tenant_salts={"a": "both", "b": "both"})
    for tenant in ("a", "b", "c"):
        await stage.client.submit(request(f"req-{tenant}", tenant=tenant))
    await until(lambda: len(stage.workers["d1"].running) == 3)
    roots = {half.request_id: half.root for half in stage.workers["d1"].decodes}
    assert roots[RequestId("req-a")] == roots[RequestId("req-b")] != roots[RequestId("req-c")]
    assert chunk_keys(roots[RequestId("req-a")], PROMPT, 16) != chunk_keys(roots[RequestId("req-c")], PROMPT, 16)


async def test_a_repeated_id_is_served_once(open_stage: OpenStage) -> None:
    stage = await open_stage()
    await stage.client.submit(request())
    await stage.client.submit_raw(encode(request()))  # without the message id, so the broker can't tell
    decode = stage.workers["d1"]
    await until(lambda: bool(decode.running))
    await decode.end(RequestId("req-1"))
    await until(lambda: len(stage.conductors[0].requests) == 0)
    events: list[TokenEvent] = stage.client.events
    assert sum(isinstance(event, Finished | Failed) for event in events) == 1
    assert len(decode.decodes) == 1


async def test_it_is_seen_in_the_services_api(open_stage: OpenStage) -> None:
    stage = await open_stage()
    stage.workers["d1"].finishes = True
    bus = stage.client.bus
    inbox = bus.new_inbox()
    await bus.subscribe(inbox, stage.client._on_event)
    await bus.publish(subjects.generate(MODEL), b'{"tokens": [1]}', reply=inbox)
    await until(lambda: len(stage.client.ends()) == 1)

    async def is_counted() -> bool:
        stats = await bus.request("$SRV.STATS.halfmoon-conductor", b"", timeout_s=10.0)
        endpoints = {endpoint["subject"]: endpoint for endpoint in json.loads(stats.data)["endpoints"]}
        endpoint = endpoints[subjects.GENERATE_ALL]
        return (endpoint["num_requests"], endpoint["num_errors"]) == (1, 0)

    await until_awaited(is_counted)
