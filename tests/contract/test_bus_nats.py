"""What only a real NATS server can do to a bus: die, freeze, come back, refuse."""

import asyncio
import logging
import re
from pathlib import Path

import pytest

from halfmoon.bus.errors import BusDisconnected, BusTimeout, BusUnavailable, NoResponders, StreamGap
from halfmoon.bus.nats import NatsBus, NatsSettings
from halfmoon.bus.protocol import Bus, BusMessage, ConnectionState, Delivery, Retention, StreamSpec
from support.buses import BusMaker
from support.nats import NatsServer
from support.wait import until

pytestmark = pytest.mark.nats

WORK = StreamSpec(name="WORK", subjects=("work.*",), retention=Retention.WORK_QUEUE)
EVENTS = StreamSpec(name="EVENTS", subjects=("event.*",), retention=Retention.LIMITS)


async def no_gap(gap: StreamGap) -> None:
    raise AssertionError(f"unexpected gap: {gap}")


async def test_an_unreachable_server_is_a_clear_error_in_time() -> None:
    started = asyncio.get_running_loop().time()
    with pytest.raises(BusUnavailable) as caught:
        # Port 1 of the loopback: nothing listens on it.
        await NatsBus.connect(NatsSettings(url="nats://127.0.0.1:1", connect_timeout_s=0.5))
    assert asyncio.get_running_loop().time() - started < 10.0
    assert str(caught.value).startswith("no NATS server answers at nats://127.0.0.1:1 within 0.5 s")
    assert "nats-server -js" in str(caught.value)
    assert "HALFMOON_NATS_URL" in str(caught.value)


async def test_a_server_that_comes_up_late_is_waited_for(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    server.start()
    server.stop()
    connecting = asyncio.create_task(NatsBus.connect(NatsSettings(url=server.url, connect_timeout_s=30.0)))
    server.start()
    try:
        bus = await connecting
        assert bus.is_connected
        await bus.close()
    finally:
        server.stop()


async def test_wrong_credentials_fail_at_once_and_secrets_stay_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    with NatsServer(tmp_path, extra_config='authorization { user: "moon", password: "right-secret" }') as server:
        settings = NatsSettings(url=server.url, user="moon", password="wrong-secret", connect_timeout_s=30.0)
        async with asyncio.timeout(10.0):
            with pytest.raises(BusUnavailable, match="refuses our credentials") as caught:
                await NatsBus.connect(settings)
        in_url = server.url.replace("nats://", "nats://moon:wrong-secret@")
        with pytest.raises(BusUnavailable) as in_url_caught:
            await NatsBus.connect(NatsSettings(url=in_url, connect_timeout_s=30.0))
        bus = await NatsBus.connect(NatsSettings(url=server.url, user="moon", password="right-secret"))
        await bus.flush()
        await bus.close()
    printed = capsys.readouterr()
    for text in (
        str(caught.value),
        str(in_url_caught.value),
        repr(settings),
        NatsSettings(url=in_url).shown,
        repr(NatsSettings(url=in_url, token="wrong-secret")),
        caplog.text,
        printed.out,
        printed.err,
    ):
        assert "secret" not in text


async def test_missing_credentials_file_and_missing_jetstream_are_clear(tmp_path: Path) -> None:
    with pytest.raises(BusUnavailable, match=r"creds does not exist"):
        await NatsBus.connect(NatsSettings(credentials=tmp_path / "creds"))
    with NatsServer(tmp_path, jetstream=False) as server:
        bus = await NatsBus.connect(NatsSettings(url=server.url))
        with pytest.raises(BusUnavailable, match="nats-server -js"):
            await bus.ensure_stream(WORK)
        await bus.close()


async def test_the_servers_payload_limit_is_ours(tmp_path: Path) -> None:
    with NatsServer(tmp_path, max_payload_bytes=4096) as server:
        bus = await NatsBus.connect(NatsSettings(url=server.url))
        assert bus.max_payload_bytes == 4096
        await bus.close()


async def test_connections_come_back_after_a_kill(nats_server: NatsServer, nats_buses: BusMaker) -> None:
    bus, other = await nats_buses(), await nats_buses()
    states: list[ConnectionState] = []
    bus.watch_connection(states.append)
    got: list[bytes] = []

    async def keep(message: BusMessage) -> None:
        got.append(message.data)

    async def echo(message: BusMessage) -> None:
        await other.respond(message, message.data)

    await bus.subscribe("kept.*", keep)
    await other.subscribe("echo", echo)
    for round_number in range(2):
        nats_server.kill()
        await until(lambda: not bus.is_connected and not other.is_connected)
        # Waits in the buffer until the connection is back.
        await bus.publish("kept.a", f"{round_number}".encode())
        nats_server.start()
        await until(lambda: bus.is_connected and other.is_connected, 20.0)
        assert await echoed(bus, b"back") == b"back"
        await until(lambda round_number=round_number: f"{round_number}".encode() in got)  # type: ignore[misc]
    assert states[:3] == [ConnectionState.CONNECTED, ConnectionState.DISCONNECTED, ConnectionState.CONNECTED]


async def echoed(bus: Bus, data: bytes) -> bytes:
    """Right after a restart, the other side may not have subscribed again yet."""
    async with asyncio.timeout(20.0):
        while True:
            try:
                return (await bus.request("echo", data, timeout_s=2.0)).data
            except (NoResponders, BusTimeout):
                await asyncio.sleep(0.01)


async def test_the_send_buffer_is_bounded_while_the_server_is_away(
    nats_server: NatsServer, nats_buses: BusMaker
) -> None:
    bus = await nats_buses()
    nats_server.kill()
    await until(lambda: not bus.is_connected)
    with pytest.raises(BusTimeout):
        await bus.request("a", b"", timeout_s=0.1)

    async def flood() -> None:
        for _ in range(100):
            await bus.publish("a", bytes(1024 * 1024))

    with pytest.raises(BusDisconnected):
        await flood()


async def test_following_goes_on_without_a_gap_over_kills(nats_server: NatsServer, nats_buses: BusMaker) -> None:
    publisher, follower = await nats_buses(), await nats_buses()
    await publisher.ensure_stream(EVENTS)
    got: list[tuple[int, bytes]] = []

    async def keep(seq: int, message: BusMessage) -> None:
        got.append((seq, message.data))

    following = await follower.follow("EVENTS", keep, start_seq=1, on_gap=no_gap)
    stored: dict[int, bytes] = {}
    publishing = True

    async def publish() -> None:
        number = 0
        while publishing:
            data = f"{number}".encode()
            seq = await publisher.stream_publish("event.a", data, msg_id=f"{number}", timeout_s=40.0)
            stored[seq] = data
            number += 1
            await asyncio.sleep(0.002)

    task = asyncio.create_task(publish())
    try:
        for _ in range(2):
            before = len(got)
            await until(lambda before=before: len(got) >= before + 50, 20.0)  # type: ignore[misc]
            nats_server.kill()
            await until(lambda: not follower.is_connected)
            nats_server.start()
        before = len(got)
        await until(lambda: len(got) >= before + 50, 30.0)
    finally:
        publishing = False
        await task
    await until(lambda: got and got[-1][0] == max(stored), 20.0)
    seqs = [seq for seq, _ in got]
    assert seqs == list(range(1, len(seqs) + 1))
    # Each was stored once although its receipt may have been lost: the message ids saw to it.
    assert [data for _, data in got] == [f"{number}".encode() for number in range(len(got))]
    assert all(got[seq - 1][1] == data for seq, data in stored.items())
    assert following.active


async def test_acked_work_is_done_once_and_nothing_is_lost_over_a_kill(
    nats_server: NatsServer, nats_buses: BusMaker
) -> None:
    publisher, worker = await nats_buses(), await nats_buses()
    await publisher.ensure_stream(WORK)
    done: list[bytes] = []

    async def work(delivery: Delivery) -> None:
        done.append(delivery.data)
        await delivery.ack()

    await worker.consume("WORK", "w", "work.*", work, ack_wait_s=1.0)
    for number in range(50):
        await publisher.stream_publish("work.a", f"{number}".encode(), msg_id=f"{number}")
    await until(lambda: len(set(done)) == 50)
    nats_server.kill()
    await until(lambda: not worker.is_connected)
    nats_server.start()
    for number in range(50, 100):
        await publisher.stream_publish("work.a", f"{number}".encode(), msg_id=f"{number}", timeout_s=30.0)
    await until(lambda: len(set(done)) == 100, 30.0)


async def test_a_frozen_server_costs_time_only(nats_server: NatsServer, nats_buses: BusMaker) -> None:
    bus, other = await nats_buses(), await nats_buses()

    async def echo(message: BusMessage) -> None:
        await other.respond(message, message.data)

    await other.subscribe("echo", echo)
    nats_server.freeze()
    with pytest.raises(BusTimeout):
        await bus.request("echo", b"too early", timeout_s=0.2)
    waiting = asyncio.create_task(bus.request("echo", b"patient", timeout_s=30.0))
    await asyncio.sleep(0)
    nats_server.thaw()
    assert (await waiting).data == b"patient"


async def test_a_stream_that_vanished_is_a_gap(nats_server: NatsServer, nats_buses: BusMaker) -> None:
    bus = await nats_buses()
    await bus.ensure_stream(EVENTS)
    gaps: list[StreamGap] = []

    async def note(gap: StreamGap) -> None:
        gaps.append(gap)

    got: list[int] = []

    async def keep(seq: int, message: BusMessage) -> None:
        got.append(seq)

    await bus.follow("EVENTS", keep, start_seq=1, on_gap=note)
    for _ in range(5):
        await bus.stream_publish("event.a", b"")
    await until(lambda: len(got) == 5)
    await bus.request("$JS.API.STREAM.DELETE.EVENTS", b"", timeout_s=5.0)
    await bus.ensure_stream(EVENTS)
    await until(lambda: gaps, 20.0)
    assert (gaps[0].needed_seq, gaps[0].last_seq) == (6, 0)


async def test_the_services_api_answers_like_nats_micro(nats_buses: BusMaker) -> None:
    """`nats micro ls` sends a ping with a reply inbox and collects what comes."""
    buses = [await nats_buses() for _ in range(3)]
    ids = {(await bus.add_service("decode", "0.1.0")).id for bus in buses}
    inbox = buses[0].new_inbox()
    answers: list[BusMessage] = []

    async def collect(message: BusMessage) -> None:
        answers.append(message)

    await buses[0].subscribe(inbox, collect)
    await buses[0].publish("$SRV.PING.decode", b"", reply=inbox)
    await until(lambda: len(answers) == 3)
    assert {service_id for service_id in ids if any(service_id.encode() in a.data for a in answers)} == ids


async def test_cancelling_a_publisher_that_waits_for_room_works(nats_server: NatsServer, nats_buses: BusMaker) -> None:
    """nats-py swallows the cancellation of a task that waits for its buffer to be flushed."""
    bus = await nats_buses()
    nats_server.freeze()

    async def flood() -> None:
        while True:
            await bus.publish("a", bytes(4 * 1024 * 1024))

    task = asyncio.create_task(flood())
    done, _ = await asyncio.wait({task}, timeout=1.0)
    assert not done
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=3.0)
    nats_server.thaw()
    assert done
    assert task.cancelled()


def test_only_one_file_imports_the_client_library() -> None:
    root = Path(__file__).parents[2]
    importing = {
        path.relative_to(root).as_posix()
        for folder in ("schemas", "tracing", "shared", "services")
        for path in (root / folder).rglob("*.py")
        if re.search(r"^\s*(from|import) nats\b", path.read_text(), re.MULTILINE)
    }
    assert importing == {"shared/halfmoon/bus/nats.py"}


async def test_nothing_is_left_behind(nats_server: NatsServer) -> None:
    before = asyncio.all_tasks()
    for _ in range(3):
        bus = await NatsBus.connect(NatsSettings(url=nats_server.url))
        await bus.ensure_stream(EVENTS)

        async def ignore(message: BusMessage) -> None: ...

        async def skip(seq: int, message: BusMessage) -> None: ...

        async def work(delivery: Delivery) -> None: ...

        await bus.subscribe("a", ignore, concurrency=4)
        await bus.follow("EVENTS", skip, start_seq=1, on_gap=no_gap)
        await bus.ensure_stream(WORK)
        await bus.consume("WORK", "w", "work.*", work)
        await bus.add_service("x", "1.0.0")
        await bus.close()
    await until(lambda: asyncio.all_tasks() == before)
