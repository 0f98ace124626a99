"""What every bus does with plain messages: once in memory, once over a real NATS server."""

import asyncio
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.bus.errors import BadSubject, BusClosed, BusTimeout, NoResponders, PayloadTooLarge
from halfmoon.bus.matching import check_pattern, check_subject, matches
from halfmoon.bus.protocol import BusMessage, ConnectionState
from support.buses import BusMaker
from support.wait import until


async def test_a_message_reaches_its_subscriber_whole(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    got: list[BusMessage] = []

    async def keep(message: BusMessage) -> None:
        got.append(message)

    await bus.subscribe("one.two", keep)
    await bus.publish("one.two", b"\x00\xffdata", headers={"halfmoon-a": "b c", "traceparent": "é"}, reply="x.y")
    await until(lambda: got)
    assert got == [BusMessage("one.two", b"\x00\xffdata", {"halfmoon-a": "b c", "traceparent": "é"}, "x.y")]


async def test_messages_arrive_in_the_order_sent(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    got: list[bytes] = []

    async def keep(message: BusMessage) -> None:
        await asyncio.sleep(0)
        got.append(message.data)

    await bus.subscribe("order.*", keep)
    sent = [f"{i}".encode() for i in range(500)]
    for data in sent:
        await bus.publish(f"order.{int(data) % 3}", data)
    await until(lambda: len(got) == len(sent))
    assert got == sent


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.*", "a", False),
        ("a.*.c", "a.b.c", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a.b", True),
        ("*", "a", True),
    ],
)
async def test_wildcards(bus_maker: BusMaker, pattern: str, subject: str, expected: bool) -> None:
    bus = await bus_maker()
    got: list[str] = []

    async def keep(message: BusMessage) -> None:
        got.append(message.subject)

    await bus.subscribe(pattern, keep)
    done = await bus.subscribe("sentinel.done", keep) if pattern != ">" else None
    await bus.publish(subject, b"")
    await bus.publish("sentinel.done", b"")
    await until(lambda: "sentinel.done" in got)
    if expected:
        await until(lambda: subject in got)
    assert (subject in got) is expected
    assert matches(pattern, subject) is expected
    assert done is None or done.active


async def test_two_subscribers_both_hear(bus_maker: BusMaker) -> None:
    first, second = await bus_maker(), await bus_maker()
    got: Counter[str] = Counter()

    async def one(message: BusMessage) -> None:
        got["one"] += 1

    async def two(message: BusMessage) -> None:
        got["two"] += 1

    await first.subscribe("both", one)
    await second.subscribe("both", two)
    await first.publish("both", b"")
    await until(lambda: got == {"one": 1, "two": 1})


async def test_a_queue_group_shares_messages_and_each_goes_to_one(bus_maker: BusMaker) -> None:
    buses = [await bus_maker() for _ in range(3)]
    got: list[tuple[int, bytes]] = []
    everything: list[bytes] = []

    for number, bus in enumerate(buses):

        async def keep(message: BusMessage, number: int = number) -> None:
            got.append((number, message.data))

        await bus.subscribe("work.>", keep, queue="workers")

    async def hear(message: BusMessage) -> None:
        everything.append(message.data)

    await buses[0].subscribe("work.a", hear)
    sent = [f"{i}".encode() for i in range(300)]
    for data in sent:
        await buses[0].publish("work.a", data)
    await until(lambda: len(got) == len(sent) and len(everything) == len(sent))
    assert sorted(data for _, data in got) == sorted(sent)
    shares = Counter(number for number, _ in got)
    assert set(shares) == {0, 1, 2}
    # A fair draw of 300 gives fewer than 50 to one of three with a probability below 1e-8.
    assert min(shares.values()) >= 50


async def test_request_and_reply(bus_maker: BusMaker) -> None:
    asker, answerer = await bus_maker(), await bus_maker()

    async def answer(message: BusMessage) -> None:
        await answerer.respond(message, message.data[::-1], headers={"halfmoon-seen": message.headers["halfmoon-q"]})

    await answerer.subscribe("ask.me", answer, concurrency=8)
    replies = await asyncio.gather(
        *(
            asker.request("ask.me", f"{i:03}".encode(), timeout_s=5.0, headers={"halfmoon-q": f"{i}"})
            for i in range(100)
        )
    )
    assert [reply.data.decode() for reply in replies] == [f"{i:03}"[::-1] for i in range(100)]
    assert [reply.headers["halfmoon-seen"] for reply in replies] == [f"{i}" for i in range(100)]


async def test_nobody_there_is_known_at_once(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    async with asyncio.timeout(10.0):
        with pytest.raises(NoResponders, match=r"nobody listens on 'no\.one'"):
            await bus.request("no.one", b"", timeout_s=60.0)


async def test_a_request_that_nobody_answers_times_out(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    heard = asyncio.Event()

    async def ignore(message: BusMessage) -> None:
        heard.set()

    await bus.subscribe("silent", ignore)
    with pytest.raises(BusTimeout) as caught:
        await bus.request("silent", b"", timeout_s=0.05)
    assert caught.value.subject == "silent"
    assert caught.value.timeout_s == 0.05
    await heard.wait()


async def test_responding_to_a_message_without_reply_does_nothing(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    await bus.respond(BusMessage("a", b""), b"nobody waits")


async def test_inboxes_are_unique_and_can_be_used(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    inboxes = {bus.new_inbox() for _ in range(1000)}
    assert len(inboxes) == 1000
    got: list[bytes] = []

    async def keep(message: BusMessage) -> None:
        got.append(message.data)

    inbox = bus.new_inbox()
    await bus.subscribe(inbox, keep)
    await bus.publish(inbox, b"1")
    await bus.publish(inbox, b"2")
    await until(lambda: got == [b"1", b"2"])


async def test_close_is_idempotent_and_ends_everything(bus_maker: BusMaker) -> None:
    bus, other = await bus_maker(), await bus_maker()
    states: list[ConnectionState] = []
    bus.watch_connection(states.append)

    async def ignore(message: BusMessage) -> None: ...

    subscription = await bus.subscribe("closing", ignore)
    assert bus.is_connected
    await bus.close()
    await bus.close()
    assert not bus.is_connected
    assert not subscription.active
    assert states == [ConnectionState.CONNECTED, ConnectionState.CLOSED]
    for attempt in (
        bus.publish("a", b""),
        bus.request("a", b"", timeout_s=1.0),
        bus.subscribe("a", ignore),
        bus.stream_publish("a", b""),
    ):
        with pytest.raises(BusClosed):
            await attempt
    with pytest.raises(NoResponders):
        await other.request("closing", b"", timeout_s=5.0)


async def test_a_watcher_can_be_taken_away(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    states: list[ConnectionState] = []
    unwatch = bus.watch_connection(states.append)
    unwatch()
    unwatch()
    await bus.close()
    assert states == [ConnectionState.CONNECTED]


async def test_payloads_up_to_the_limit_pass_and_larger_ones_are_refused(bus_maker: BusMaker) -> None:
    bus = await bus_maker()
    assert bus.max_payload_bytes == 8 * 1024 * 1024

    async def size(message: BusMessage) -> None:
        await bus.respond(message, f"{len(message.data)} {message.data[-1]}".encode())

    await bus.subscribe("big", size)
    largest = bytes(bus.max_payload_bytes - 1) + b"\x07"
    assert (await bus.request("big", largest, timeout_s=20.0)).data == f"{len(largest)} 7".encode()
    with pytest.raises(PayloadTooLarge) as caught:
        await bus.publish("big", largest + b"!")
    assert caught.value.num_bytes == bus.max_payload_bytes + 1
    assert caught.value.limit_bytes == bus.max_payload_bytes
    # Headers count, so the very same payload with one more header is too large.
    with pytest.raises(PayloadTooLarge):
        await bus.request("big", largest, timeout_s=1.0, headers={"a": "b"})
    headers = {"abc": "défg"}
    frame_bytes = len("NATS/1.0\r\n") + len("abc: défg\r\n".encode()) + len("\r\n")
    fitting = bytes(bus.max_payload_bytes - frame_bytes)
    assert (await bus.request("big", fitting, timeout_s=20.0, headers=headers)).data == f"{len(fitting)} 0".encode()
    with pytest.raises(PayloadTooLarge):
        await bus.publish("big", fitting + b"!", headers=headers)


@pytest.mark.parametrize("subject", ["", "a b", "a..b", ".a", "a.", "a\r\nPUB x 0", "a.*", "a.>", "tab\t"])
async def test_bad_subjects_are_refused_before_they_are_sent(bus_maker: BusMaker, subject: str) -> None:
    bus = await bus_maker()
    with pytest.raises(BadSubject):
        await bus.publish(subject, b"")
    with pytest.raises(BadSubject):
        await bus.publish("fine", b"", reply=subject)


async def test_bad_patterns_queues_and_headers_are_refused(bus_maker: BusMaker) -> None:
    bus = await bus_maker()

    async def ignore(message: BusMessage) -> None: ...

    for pattern in ("", "a..b", ">.a", "a b"):
        with pytest.raises(BadSubject):
            await bus.subscribe(pattern, ignore)
    with pytest.raises(BadSubject):
        await bus.subscribe("a", ignore, queue="two words")
    for headers in ({"a:b": "c"}, {"": "c"}, {"a": "b\r\nc: d"}):
        with pytest.raises(BadSubject):
            await bus.publish("a", b"", headers=headers)


async def test_a_service_is_found_by_the_services_api(bus_maker: BusMaker) -> None:
    bus, other = await bus_maker(), await bus_maker()
    service = await bus.add_service("decode", "1.2.3", "generates tokens", metadata={"worker": "d-1"})
    endpoint = service.add_endpoint("split", "halfmoon.request.split.decode.d-1")
    endpoint.count(2_000)
    endpoint.count(4_000, "busy")
    identity = {"name": "decode", "id": service.id, "version": "1.2.3", "metadata": {"worker": "d-1"}}
    ping = answered(await other.request("$SRV.PING", b"", timeout_s=5.0))
    assert ping == {**identity, "type": "io.nats.micro.v1.ping_response"}
    info = answered(await other.request("$SRV.INFO.decode", b"", timeout_s=5.0))
    assert info["description"] == "generates tokens"
    assert info["endpoints"] == [
        {"name": "split", "subject": "halfmoon.request.split.decode.d-1", "queue_group": "", "metadata": {}}
    ]
    stats = answered(await other.request(f"$SRV.STATS.decode.{service.id}", b"", timeout_s=5.0))
    assert stats["endpoints"] == [
        {
            "name": "split",
            "subject": "halfmoon.request.split.decode.d-1",
            "queue_group": "",
            "num_requests": 2,
            "num_errors": 1,
            "last_error": "busy",
            "processing_time": 6_000,
            "average_processing_time": 3_000,
        }
    ]
    await service.stop()
    await service.stop()
    await bus.flush()
    with pytest.raises(NoResponders):
        await other.request("$SRV.PING", b"", timeout_s=5.0)
    with pytest.raises(ValueError, match="name"):
        await bus.add_service("not good", "1.0.0")
    with pytest.raises(ValueError, match="version"):
        await bus.add_service("good", "1.0")


def answered(message: BusMessage) -> dict[str, object]:
    return msgspec.json.decode(message.data, type=dict[str, object])


_tokens = st.text(alphabet="ab*>.", max_size=8)


@given(_tokens, _tokens)
def test_a_pattern_without_wildcards_matches_itself_alone(pattern: str, subject: str) -> None:
    try:
        check_subject(subject)
        check_subject(pattern)
    except BadSubject:
        return
    assert matches(pattern, subject) is (pattern == subject)


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=4), st.data())
def test_replacing_tokens_by_wildcards_still_matches(tokens: list[str], data: st.DataObject) -> None:
    places = data.draw(st.sets(st.integers(0, len(tokens) - 1)))
    pattern = ".".join("*" if place in places else token for place, token in enumerate(tokens))
    assert matches(pattern, ".".join(tokens))
    cut = data.draw(st.integers(0, len(tokens) - 1))
    assert matches(".".join([*tokens[:cut], ">"]), ".".join(tokens))
    assert not matches(".".join([*tokens, ">"]), ".".join(tokens))
    assert check_pattern(pattern) == pattern.split(".")
