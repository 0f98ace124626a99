"""Typed messages over every bus: answers, refusals, deadlines, traces, and whatever bytes come."""

import asyncio
import time

import msgpack
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfmoon.bus.codec import Decoder, decode, detect_encoding, encode
from halfmoon.bus.endpoint import (
    Envelope,
    announce,
    call,
    error_of,
    open_envelope,
    read_stream,
    seal,
    serve,
    submit,
    take_work,
)
from halfmoon.bus.errors import BusTimeout, NoResponders, RemoteError, StreamGap, Undecodable
from halfmoon.bus.memory import MemoryBus
from halfmoon.bus.protocol import Bus, BusMessage, Delivery, Retention, StreamSpec
from halfmoon.schemas.chunks import ChunkEvent, ChunkEvicted, EvictReason, NodeCleared
from halfmoon.schemas.ids import ChunkKey, LeaseId, ModelName, NodeId, RequestId
from halfmoon.schemas.kv_tier import Describe, Done, KvTierRequest, Release, Renew, Renewed
from halfmoon.schemas.pool_stats import Stats
from halfmoon.schemas.requests import ConductorInbox, Encoding, Failed, RequestCancel, RequestSubmitted
from halfmoon.schemas.wire import HEADER_DEADLINE, HEADER_REPLY, Error, ErrorCode, Message
from halfmoon.tracing import TelemetryConfig, setup
from halfmoon.tracing.context import span_context, trace_id_of
from support.buses import BusMaker
from support.wait import until

SUBJECT = "halfmoon.kvtier.node-a.verb"


async def answer(message: KvTierRequest, envelope: Envelope) -> Message | None:
    match message:
        case Renew():
            return Renewed(expired=message.lease_ids)
        case Release():
            return None
        case Describe():
            raise RemoteError(Error(code=ErrorCode.BUSY, message="come back later", retry_after_s=1.5))
        case _:
            raise RuntimeError("a secret detail")


def renew(*names: str) -> Renew:
    return Renew(lease_ids=tuple(LeaseId(name) for name in names), lease_s=1.0)


async def test_a_call_returns_the_typed_answer(bus_maker: BusMaker) -> None:
    server, client = await bus_maker(), await bus_maker()
    endpoint = await serve(server, SUBJECT, KvTierRequest, answer)
    renewed = await call(client, SUBJECT, renew("a", "b"), Renewed, timeout_s=5.0)
    assert renewed == Renewed(expired=(LeaseId("a"), LeaseId("b")))
    assert endpoint.counts.handled == 1
    await endpoint.drain()
    await server.flush()
    with pytest.raises(NoResponders):
        await call(client, SUBJECT, renew(), Renewed, timeout_s=5.0)


async def test_refusals_and_defects_come_back_typed(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    service = await bus.add_service("kv-tier", "0.1.0")
    record = service.add_endpoint("verb", SUBJECT)
    endpoint = await serve(bus, SUBJECT, KvTierRequest, answer, record=record)
    with pytest.raises(RemoteError) as refused:
        await call(bus, SUBJECT, Describe(), Done, timeout_s=5.0)
    assert refused.value.error == Error(code=ErrorCode.BUSY, message="come back later", retry_after_s=1.5)
    with pytest.raises(RemoteError) as defect:
        await call(bus, SUBJECT, Stats(), Done, timeout_s=5.0)
    assert defect.value.error.code is ErrorCode.INTERNAL
    assert "secret" not in defect.value.error.message
    assert (endpoint.counts.refused, endpoint.counts.failed, endpoint.counts.handled) == (1, 1, 0)
    assert (record.num_requests, record.num_errors, record.last_error) == (2, 2, "internal")  # type: ignore[attr-defined]
    assert await call(bus, SUBJECT, renew(), Renewed, timeout_s=5.0) == Renewed()


async def test_an_answer_of_another_type_is_undecodable(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    await serve(bus, SUBJECT, KvTierRequest, answer)
    with pytest.raises(Undecodable, match="Done or Error"):
        await call(bus, SUBJECT, renew(), Done, timeout_s=5.0)


async def test_undecodable_messages_are_answered_counted_and_done_with(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    endpoint = await serve(bus, SUBJECT, KvTierRequest, answer)
    reply = await bus.request(SUBJECT, b"\x93nonsense", timeout_s=5.0)
    error = decode(reply.data, Error)
    assert error.code is ErrorCode.INVALID_MESSAGE
    assert "Describe or Acquire" in error.message
    await bus.publish(SUBJECT, b"nobody waits for this one")
    spoken = await bus.request(SUBJECT, b'{"type": "kvtier.renew.v1", "lease_ids": 7}', timeout_s=5.0)
    assert msgspec.json.decode(spoken.data)["code"] == "invalid_message"
    assert "lease_ids" in msgspec.json.decode(spoken.data)["message"]
    assert endpoint.counts.undecodable == 3
    assert await call(bus, SUBJECT, renew("x"), Renewed, timeout_s=5.0) == Renewed(expired=(LeaseId("x"),))


async def test_json_is_answered_in_json(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    await serve(bus, SUBJECT, KvTierRequest, answer)
    text = b' {"type": "kvtier.renew.v1", "lease_ids": ["a"], "lease_s": 2}'
    reply = await bus.request(SUBJECT, text, timeout_s=5.0)
    assert msgspec.json.decode(reply.data) == {"type": "kvtier.renewed.v1", "expired": ["a"]}
    assert reply.headers["content-type"] == "application/json"
    renewed = await call(bus, SUBJECT, renew("b"), Renewed, timeout_s=5.0, encoding=Encoding.JSON)
    assert renewed == Renewed(expired=(LeaseId("b"),))


async def test_a_plain_msgpack_client_can_ask(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    await serve(bus, SUBJECT, KvTierRequest, answer)
    asked = msgpack.packb({"type": "kvtier.renew.v1", "lease_ids": ["a"], "lease_s": 2.0, "new field": 1})
    reply = await bus.request(SUBJECT, asked, timeout_s=5.0)
    assert msgpack.unpackb(reply.data) == {"type": "kvtier.renewed.v1", "expired": ["a"]}


async def test_errors_can_be_wrapped_for_their_reader(bus_maker: BusMaker) -> None:
    bus = await bus_maker()

    def failed(error: Error) -> Message:
        return Failed(request_id=RequestId(""), error=error)

    async def never(message: RequestSubmitted, envelope: Envelope) -> Message | None:
        raise AssertionError("not called")

    await serve(bus, "halfmoon.generate.*", RequestSubmitted, never, as_reply=failed)
    reply = await bus.request("halfmoon.generate.m", b'{"prompt": 1}', timeout_s=5.0)
    assert msgspec.json.decode(reply.data, type=Failed).error.code is ErrorCode.INVALID_MESSAGE


async def test_late_work_is_not_begun(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    called: list[Message] = []

    async def note(message: KvTierRequest, envelope: Envelope) -> Message | None:
        called.append(message)
        return Done()

    endpoint = await serve(bus, SUBJECT, KvTierRequest, note)
    past = {HEADER_DEADLINE: str(time.time_ns() - 1)}
    reply = await bus.request(SUBJECT, encode(renew()), timeout_s=5.0, headers=past)
    assert decode(reply.data, Error).code is ErrorCode.DEADLINE
    assert called == []
    assert endpoint.counts.expired == 1
    with pytest.raises(BusTimeout):
        await call(bus, SUBJECT, renew(), Done, timeout_s=5.0, deadline_ns=time.time_ns() - 1)
    assert called == []


async def test_a_call_waits_no_longer_than_its_deadline(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    envelopes: list[Envelope] = []

    async def hang(message: KvTierRequest, envelope: Envelope) -> Message | None:
        envelopes.append(envelope)
        await asyncio.Event().wait()
        return None

    await serve(bus, SUBJECT, KvTierRequest, hang)
    deadline_ns = time.time_ns() + 300_000_000
    async with asyncio.timeout(30.0):
        with pytest.raises(BusTimeout):
            await call(bus, SUBJECT, renew(), Done, timeout_s=3600.0, deadline_ns=deadline_ns)
    assert envelopes[0].deadline_ns == deadline_ns
    assert envelopes[0].remaining_s(deadline_ns - 2_500_000_000) == 2.5
    assert envelopes[0].remaining_s() == 0.0
    assert envelopes[0].is_expired()


async def test_the_trace_goes_on_at_the_other_side(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    seen: list[str | None] = []

    async def note(message: KvTierRequest, envelope: Envelope) -> Message | None:
        seen.extend((trace_id_of(), trace_id_of(envelope.context)))
        return Done()

    await serve(bus, SUBJECT, KvTierRequest, note)
    async with setup("test", TelemetryConfig()) as telemetry:
        with telemetry.tracer.span("halfmoon.test"):
            here = trace_id_of()
            assert here is not None
            await call(bus, SUBJECT, Describe(), Done, timeout_s=5.0)
    assert seen == [here, here]
    await call(bus, SUBJECT, Describe(), Done, timeout_s=5.0)
    assert seen[2:] == [None, None]
    assert span_context() is None


async def test_announcements_reach_typed_handlers_in_order(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    got: list[Message] = []

    async def note(message: RequestCancel, envelope: Envelope) -> Message | None:
        got.append(message)
        return None

    await serve(bus, "halfmoon.request.cancel", RequestCancel, note)
    sent = [RequestCancel(request_id=RequestId(f"req-{i}")) for i in range(50)]
    for message in sent:
        await announce(bus, "halfmoon.request.cancel", message)
    await until(lambda: len(got) == 50)
    assert got == sent


async def test_an_answer_too_large_becomes_an_error(bus_maker: BusMaker) -> None:
    bus = await bus_maker()

    async def flood(message: KvTierRequest, envelope: Envelope) -> Message | None:
        return Renewed(expired=tuple(LeaseId("x" * 1000) for _ in range(9000)))

    await serve(bus, SUBJECT, KvTierRequest, flood)
    with pytest.raises(RemoteError) as caught:
        await call(bus, SUBJECT, renew(), Renewed, timeout_s=10.0)
    assert caught.value.error.code is ErrorCode.INTERNAL
    assert "8,388,608" in caught.value.error.message


async def test_typed_work_and_what_can_not_be_read_of_it(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    await bus.ensure_stream(
        StreamSpec(name="REQUESTS", subjects=("halfmoon.request.*",), retention=Retention.WORK_QUEUE)
    )
    got: list[tuple[Message, str | None]] = []
    errors: list[Error] = []

    async def work(message: ConductorInbox, delivery: Delivery, envelope: Envelope) -> None:
        got.append((message, envelope.reply))
        await delivery.ack()

    async def hear(message: BusMessage) -> None:
        errors.append(decode(message.data, Error))

    await bus.subscribe("inbox.errors", hear)
    endpoint = await take_work(
        bus, "REQUESTS", "conductors", "halfmoon.request.*", ConductorInbox, work, ack_wait_s=0.3
    )
    await bus.stream_publish("halfmoon.request.m", b"\xc1", headers={HEADER_REPLY: "inbox.errors"})
    await bus.stream_publish("halfmoon.request.m", b"\xc1")
    request = RequestSubmitted(request_id=RequestId("r"), model=ModelName("m"), prompt="hello")
    assert await submit(bus, "halfmoon.request.m", request, msg_id="r", reply="inbox.tokens") == 3
    assert await submit(bus, "halfmoon.request.m", request, msg_id="r", reply="inbox.tokens") == 3
    await until(lambda: got and errors)
    assert got == [(request, "inbox.tokens")]
    assert [error.code for error in errors] == [ErrorCode.INVALID_MESSAGE]
    assert (endpoint.counts.undecodable, endpoint.counts.handled) == (2, 1)


async def test_typed_events_skip_what_can_not_be_read(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    await bus.ensure_stream(StreamSpec(name="CHUNKS", subjects=("halfmoon.evict.*",), retention=Retention.LIMITS))
    got: list[tuple[int, Message]] = []

    async def note(seq: int, message: ChunkEvent) -> None:
        got.append((seq, message))

    async def no_gap(gap: StreamGap) -> None:
        raise AssertionError(gap)

    endpoint = await read_stream(bus, "CHUNKS", ChunkEvent, note, start_seq=1, on_gap=no_gap)
    cleared = NodeCleared(node=NodeId("a"), epoch=1)
    evicted = ChunkEvicted(node=NodeId("a"), epoch=1, keys=(ChunkKey(bytes(32)),), reason=EvictReason.FLUSH)
    await submit(bus, "halfmoon.evict.a", cleared)
    await bus.stream_publish("halfmoon.evict.a", b"\xff")
    await submit(bus, "halfmoon.evict.a", evicted)
    await until(lambda: len(got) == 2)
    assert got == [(1, cleared), (3, evicted)]
    assert endpoint.counts.undecodable == 1


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.one_of(
        st.binary(max_size=200),
        st.binary(max_size=100).map(lambda tail: b"{" + tail),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
            lambda inner: (
                st.lists(inner, max_size=4)
                | st.dictionaries(st.sampled_from(["type", "lease_ids", "chunks", "x"]), inner, max_size=4)
            ),
            max_leaves=12,
        ).map(msgpack.packb),
        st.tuples(st.integers(0, 60), st.integers(0, 255)).map(lambda at: damaged(*at)),
    ),
    content_type=st.sampled_from([None, "application/json", "application/msgpack", "text/plain"]),
    deadline=st.sampled_from([None, "soon", "-1", "9" * 40, "１２", ""]),
)
def test_whatever_comes_the_endpoint_answers_and_goes_on(
    data: bytes, content_type: str | None, deadline: str | None
) -> None:
    async def scenario() -> None:
        bus = MemoryBus()
        endpoint = await serve(bus, SUBJECT, KvTierRequest, answer)
        headers = {"content-type": content_type, HEADER_DEADLINE: deadline}
        given_headers = {name: value for name, value in headers.items() if value is not None}
        try:
            Decoder[KvTierRequest](KvTierRequest).decode(data, given_headers)
            readable = True
        except Undecodable:
            readable = False
        if not readable:
            reply = await bus.request(SUBJECT, data, timeout_s=5.0, headers=given_headers)
            assert decode(reply.data, Error, reply.headers).code is ErrorCode.INVALID_MESSAGE
            assert endpoint.counts.undecodable == 1
        renewed = await call(bus, SUBJECT, renew("still here"), Renewed, timeout_s=5.0)
        assert renewed == Renewed(expired=(LeaseId("still here"),))
        await bus.close()

    asyncio.run(scenario())


def damaged(place: int, byte: int) -> bytes:
    """A good message with one byte replaced."""
    good = bytearray(encode(renew("lease-1", "lease-2")))
    good[place % len(good)] = byte
    return bytes(good)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b'{"a":' * 100_000,
        b"\x82\xa4type\xb0kvtier.renew.v1\xa9lease_ids\xdd\xff\xff\xff\xff",
        b"\x81\xa4type\xa2\xff\xfe",
    ],
    ids=["empty", "cut short", "huge array", "deep msgpack", "deep json", "huge array inside", "no utf-8"],
)
def test_hostile_bytes_are_undecodable_and_nothing_worse(data: bytes) -> None:
    with pytest.raises(Undecodable):
        decode(data, KvTierRequest)


def test_encodings_are_told_apart() -> None:
    message = renew("a")
    for encoding in Encoding:
        data = encode(message, encoding)
        assert detect_encoding(data) is encoding
        assert decode(data, Renew) == message
        assert decode(data, KvTierRequest) == message
    assert detect_encoding(b"{", {"Content-Type": "application/msgpack"}) is Encoding.MSGPACK
    assert detect_encoding(b"[1]", {"content-type": "Application/JSON; charset=utf-8"}) is Encoding.JSON


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RemoteError(Error(code=ErrorCode.STALE, message="x")), ErrorCode.STALE),
        (Undecodable("x"), ErrorCode.INVALID_MESSAGE),
        (NoResponders("a.b"), ErrorCode.UNAVAILABLE),
        (BusTimeout("a.b", 1.0), ErrorCode.UNAVAILABLE),
        (TimeoutError(), ErrorCode.DEADLINE),
        (ZeroDivisionError("x"), ErrorCode.INTERNAL),
    ],
)
def test_each_exception_has_its_code(error: Exception, code: ErrorCode) -> None:
    assert error_of(error).code is code


def test_the_reply_header_comes_before_the_reply_subject() -> None:
    message = BusMessage("a", b"", seal({HEADER_REPLY: "from.header"}), reply="from.message")
    assert open_envelope(message).reply == "from.header"
    assert open_envelope(BusMessage("a", b"", {}, reply="from.message")).reply == "from.message"
    assert open_envelope(BusMessage("a", b"")).reply is None


async def test_handlers_run_side_by_side_when_asked(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    both = asyncio.Barrier(2)

    async def meet(message: KvTierRequest, envelope: Envelope) -> Message | None:
        async with asyncio.timeout(10.0):
            await both.wait()
        return Done()

    await serve(bus, SUBJECT, KvTierRequest, meet, concurrency=2)

    async def ask(bus: Bus) -> Done:
        return await call(bus, SUBJECT, Describe(), Done, timeout_s=15.0)

    assert list(await asyncio.gather(ask(bus), ask(bus))) == [Done(), Done()]
