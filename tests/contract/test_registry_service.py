"""The registry on a bus and a real etcd: what it is told, what it answers, what it announces."""

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfmoon.bus.codec import decode
from halfmoon.bus.endpoint import announce, call
from halfmoon.bus.errors import RemoteError
from halfmoon.bus.memory import MemoryBroker, MemoryBus
from halfmoon.bus.protocol import Bus
from halfmoon.bus.streams import CHUNKS
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkEvent, ChunkEvicted, ChunkPlacement, ChunkRegistered
from halfmoon.schemas.ids import ChunkKey, NodeId, WorkerId
from halfmoon.schemas.members import Goodbye
from halfmoon.schemas.registry import (
    LookedUp,
    Lookup,
    MemberJoined,
    MemberList,
    MemberLost,
    Members,
    Snapshot,
    SnapshotPage,
)
from halfmoon.schemas.wire import Error, ErrorCode
from support.buses import BusMaker
from support.etcd import EtcdServer
from support.heart import Heart
from support.registry import (
    CALL_TIMEOUT_S,
    Ear,
    RunningRegistry,
    applied,
    cleared,
    eventually,
    evicted,
    key,
    lookup,
    placement,
    pool_beat,
    publish,
    registered,
    snapshot,
)
from support.wait import until

pytestmark = pytest.mark.etcd


@pytest.fixture(scope="module")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def prefix() -> str:
    return f"/test-{secrets.token_hex(4)}"


async def test_registered_chunks_are_found_until_they_are_evicted(
    bus_maker: BusMaker, etcd_server: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    bus = await bus_maker()
    async with RunningRegistry(bus, tmp_path, etcd_server.url, prefix):
        await publish(bus, registered("a", 1, 1, 2, 3))
        await applied(bus, await publish(bus, registered("b", 1, 2)))
        assert await lookup(bus, 2, 9, 1) == (
            (placement("a", 1, 2), placement("b", 1, 2)),
            (),
            (placement("a", 1, 1),),
        )
        await applied(bus, await publish(bus, evicted("a", 1, 2, 3)))
        assert await lookup(bus, 1, 2, 3) == ((placement("a", 1, 1),), (placement("b", 1, 2),), ())


async def test_a_new_life_of_a_node_hides_all_of_the_old_one_and_the_sweep_removes_it(
    bus_maker: BusMaker, etcd_server: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    bus = await bus_maker()
    async with RunningRegistry(bus, tmp_path, etcd_server.url, prefix) as registry:
        await publish(bus, registered("a", 1, *range(2500)))
        await publish(bus, registered("b", 1, 1))
        await applied(bus, await publish(bus, cleared("a", 2)))
        assert await lookup(bus, 1, 2499) == ((placement("b", 1, 1),), ())
        await publish(bus, registered("a", 1, 7))
        await applied(bus, await publish(bus, registered("a", 2, 8)))
        assert await lookup(bus, 7, 8) == ((), (placement("a", 2, 8),)), "the old life's last words count for nothing"
        await eventually(lambda: _num_keys(registry, "chunks", 2), what="the old placements are deleted")
        assert await lookup(bus, 1, 8) == ((placement("b", 1, 1),), (placement("a", 2, 8),))


async def _num_keys(registry: RunningRegistry, kind: str, expected: int) -> bool:
    from halfmoon.registry.etcd import Etcd
    from halfmoon.registry.keys import all_under

    config = registry.config
    async with Etcd((config.etcd_url.removeprefix("http://"),)) as etcd:
        found = await etcd.transact((), [all_under(f"{config.key_prefix}/{kind}/".encode())], timeout_s=5.0)
        return len(found.ranges[0]) == expected


async def test_a_restart_in_mid_stream_loses_nothing_and_repeats_nothing(
    bus_maker: BusMaker, etcd_server: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    bus, publisher = await bus_maker(), await bus_maker()
    await bus.ensure_stream(CHUNKS)
    expected: set[ChunkPlacement] = set()
    stopped = asyncio.Event()
    last_seq = 0

    async def flood() -> None:
        nonlocal last_seq
        number = 0
        while not stopped.is_set():
            await publish(publisher, registered("a", 1, number, number + 1))
            last_seq = await publish(publisher, evicted("a", 1, number))
            expected.add(placement("a", 1, number + 1))
            number += 2
            await asyncio.sleep(0.001)

    flooding = asyncio.create_task(flood())
    for _ in range(4):
        seen = last_seq
        async with RunningRegistry(bus, tmp_path, etcd_server.url, prefix):
            await applied(bus, seen + 1)
    stopped.set()
    await flooding
    async with RunningRegistry(bus, tmp_path, etcd_server.url, prefix):
        await applied(bus, last_seq)
        placements, stream_seq, _ = await snapshot(bus)
        assert (set(placements), stream_seq) == (expected, last_seq)
        assert len(placements) == len(expected)


class Index:
    """What a conductor keeps: a snapshot, and the stream from there."""

    def __init__(self, placements: list[ChunkPlacement], epochs: dict[NodeId, int]) -> None:
        self.epochs = dict(epochs)
        self.held = {(each.node, each.chunk.key): each for each in placements}

    def take(self, event: ChunkEvent) -> None:
        if event.epoch < self.epochs.get(event.node, 0):
            return
        if event.epoch > self.epochs.get(event.node, 0):
            self.epochs[event.node] = event.epoch
            self.held = {place: each for place, each in self.held.items() if place[0] != event.node}
        if isinstance(event, ChunkRegistered):
            for chunk in event.chunks:
                self.held[event.node, chunk.key] = ChunkPlacement(node=event.node, epoch=event.epoch, chunk=chunk)
        elif isinstance(event, ChunkEvicted):
            for gone in event.keys:
                self.held.pop((event.node, gone), None)


_numbers = st.lists(st.integers(0, 9), max_size=5)
_nodes, _epochs = st.sampled_from(["a", "b", "c"]), st.integers(1, 3)
_events = st.one_of(
    st.builds(lambda node, epoch, xs: registered(node, epoch, *xs), _nodes, _epochs, _numbers),
    st.builds(lambda node, epoch, xs: registered(node, epoch, *xs), _nodes, _epochs, _numbers),
    st.builds(lambda node, epoch, xs: evicted(node, epoch, *xs), _nodes, _epochs, _numbers),
    st.builds(cleared, _nodes, _epochs),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=st.lists(_events, max_size=15), after=st.lists(_events, max_size=8), limit=st.integers(1, 4))
async def test_a_snapshot_and_the_stream_from_there_are_what_the_whole_stream_says(
    etcd_server: EtcdServer, tmp_path: Path, before: list[ChunkEvent], after: list[ChunkEvent], limit: int
) -> None:
    bus = MemoryBus(MemoryBroker())
    prefix = f"/test-{secrets.token_hex(4)}"
    async with RunningRegistry(bus, tmp_path, etcd_server.url, prefix):
        last_seq = 0
        for event in before:
            last_seq = await publish(bus, event)
        await applied(bus, last_seq)
        asking = asyncio.create_task(snapshot(bus, limit))
        for event in after:
            await publish(bus, event)
        placements, stream_seq, epochs = await asking
        stream = [*before, *after]
        index, replay = Index(placements, epochs), Index([], {})
        for event in stream[stream_seq:]:
            index.take(event)
        for event in stream:
            replay.take(event)
        assert index.held == replay.held
        assert {each.node: each.epoch for each in placements}.items() <= epochs.items()
        assert len(placements) == len({(each.node, each.chunk.key) for each in placements})
    await bus.close()


async def test_members_join_are_listed_and_are_lost_with_their_placements(
    bus_maker: BusMaker, etcd_server: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    bus, ear = await bus_maker(), Ear()
    await ear.listen(bus)
    node, worker = NodeId("a"), WorkerId("kv-a")
    async with RunningRegistry(bus, tmp_path, etcd_server.url, prefix, member_ttl_s=2) as registry:
        heart, other = Heart(bus, pool_beat("kv-a", "a", 1)), Heart(bus, pool_beat("kv-b", "b", 1))
        await until(lambda: ear.of("kv-a") == [MemberJoined(worker=worker, node=node)], what="kv-a joined")
        await publish(bus, registered("b", 1, 1))
        await applied(bus, await publish(bus, registered("a", 1, 1)))

        async def listed() -> set[WorkerId]:
            answer = await call(bus, subjects.registry("members"), Members(), MemberList, timeout_s=CALL_TIMEOUT_S)
            return {member.worker for member in answer.members}

        async def all_are_listed() -> bool:
            return await listed() == {worker, WorkerId("kv-b"), registry.worker}

        await eventually(all_are_listed)
        await heart.stop()
        await until(lambda: len(ear.of("kv-a")) == 2, what="kv-a is lost")
        lost = ear.of("kv-a")[1]
        assert isinstance(lost, MemberLost)
        assert lost.node == node
        assert lost.reason.startswith("no heartbeat for 2.")

        async def only_b_has_it() -> bool:
            return await lookup(bus, 1) == ((placement("b", 1, 1),),)

        async def a_has_it_too() -> bool:
            return await lookup(bus, 1) == ((placement("a", 1, 1), placement("b", 1, 1)),)

        async def a_is_not_listed() -> bool:
            return await listed() == {WorkerId("kv-b"), registry.worker}

        await eventually(only_b_has_it)
        await eventually(a_is_not_listed)
        # It was cut off, not dead: its pool still holds everything, and nobody needs to say so again.
        heart = Heart(bus, pool_beat("kv-a", "a", 1))
        await eventually(a_has_it_too)
        assert ear.of("kv-a")[2:] == [MemberJoined(worker=worker, node=node)]
        await heart.stop()
        await announce(bus, subjects.heartbeat(worker), Goodbye(worker=worker))
        await eventually(only_b_has_it)
        assert ear.of("kv-a")[3:] == [MemberLost(worker=worker, node=node, reason="left")]
        await other.stop()


async def test_a_node_that_stays_away_is_forgotten_and_leaves_no_keys(
    etcd_server: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    bus = MemoryBus(MemoryBroker())
    async with RunningRegistry(
        bus, tmp_path, etcd_server.url, prefix, forget_node_after_s=0.5, unheard_node_grace_s=0.5
    ) as registry:
        await applied(bus, await publish(bus, registered("never-heard", 1, *range(1500))))
        await eventually(lambda: _num_keys(registry, "chunks", 0), what="its placements are deleted")
        await eventually(lambda: _num_keys(registry, "nodes", 0), what="its record is deleted")
        await applied(bus, await publish(bus, registered("never-heard", 1, 7)))
        assert await _num_keys(registry, "nodes", 1)
    await bus.close()


async def test_what_nobody_can_read_is_counted_and_passed_over(
    bus_maker: BusMaker, etcd_server: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    bus = await bus_maker()
    async with RunningRegistry(bus, tmp_path, etcd_server.url, prefix):
        for junk in (b"", b"\xc1", b"{", b"\x80", msgpack.packb({"type": "chunk.registered.v9"}), b"\xff" * 2000):
            await bus.stream_publish(subjects.chunk_registered(NodeId("a")), junk)
            await bus.publish(subjects.heartbeat(WorkerId("w")), junk)
            reply = await bus.request(subjects.registry("lookup"), junk, timeout_s=CALL_TIMEOUT_S)
            assert decode(reply.data, Error).code is ErrorCode.INVALID_MESSAGE
        await applied(bus, await publish(bus, registered("a", 1, 1)))
        assert await lookup(bus, 1) == ((placement("a", 1, 1),),)


async def test_junk_at_the_end_of_the_stream_is_not_read_again(
    etcd_server: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    bus = MemoryBus(MemoryBroker())
    for _ in range(2):
        async with RunningRegistry(bus, tmp_path, etcd_server.url, prefix):
            await applied(bus, await publish(bus, registered("a", 1, 1)))
            await bus.stream_publish(subjects.chunk_registered(NodeId("a")), b"\xc1")
    await bus.close()


async def test_a_stream_made_anew_is_followed_from_its_beginning(
    etcd_server: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    for numbers in ((1, 2), (3,)):
        bus = MemoryBus(MemoryBroker())
        async with RunningRegistry(bus, tmp_path, etcd_server.url, prefix):

            async def is_applied(bus: Bus = bus, number: int = numbers[-1]) -> bool:
                return await lookup(bus, number) == ((placement("a", 1, number),),)

            for number in numbers:
                await publish(bus, registered("a", 1, number))
            await eventually(is_applied)
            assert (await snapshot(bus))[1] == len(numbers)
        await bus.close()


@pytest.mark.nats
async def test_events_that_are_gone_are_passed_over_and_what_comes_next_is_not(
    nats_buses: BusMaker, etcd_server: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    bus = await nats_buses()
    async with RunningRegistry(bus, tmp_path, etcd_server.url, prefix):
        await applied(bus, await publish(bus, registered("a", 1, 1)))
    for number in (2, 3, 4):
        await publish(bus, registered("a", 1, number))
    await bus.request(f"$JS.API.STREAM.PURGE.{CHUNKS.name}", b"", timeout_s=5.0)
    async with RunningRegistry(bus, tmp_path, etcd_server.url, prefix):
        last_seq = await publish(bus, registered("a", 1, 5))
        assert last_seq == 5
        await applied(bus, last_seq)
        placements, stream_seq, _ = await snapshot(bus)
        assert {each.chunk.key for each in placements} == {key(1), key(5)}
        assert stream_seq == last_seq


@pytest.mark.parametrize(
    ("verb", "ask", "code", "complaint"),
    [
        ("lookup", Lookup(keys=(key(1),) * 1025), ErrorCode.INVALID_REQUEST, "at most 1024 keys, got 1025"),
        ("lookup", Lookup(keys=(ChunkKey(b"short"),)), ErrorCode.INVALID_REQUEST, "a chunk key is 32 bytes"),
        ("snapshot", Snapshot(limit=0), ErrorCode.INVALID_REQUEST, "limit is from 1 to 5000, got 0"),
        ("snapshot", Snapshot(cursor=b"x"), ErrorCode.INVALID_REQUEST, "neither cursor nor revision"),
        ("snapshot", Snapshot(revision=3), ErrorCode.INVALID_REQUEST, "neither cursor nor revision"),
        ("snapshot", Snapshot(cursor=b"x", revision=-3), ErrorCode.INVALID_REQUEST, "neither cursor nor revision"),
        ("snapshot", Snapshot(cursor=b"x", revision=10**9), ErrorCode.STALE, "start again from the first page"),
    ],
)
async def test_questions_that_make_no_sense_are_refused(
    etcd_server: EtcdServer,
    prefix: str,
    tmp_path: Path,
    verb: str,
    ask: Lookup | Snapshot,
    code: ErrorCode,
    complaint: str,
) -> None:
    bus = MemoryBus(MemoryBroker())
    async with RunningRegistry(bus, tmp_path, etcd_server.url, prefix):
        with pytest.raises(RemoteError, match=complaint) as caught:
            await call(bus, subjects.registry(verb), ask, LookedUp | SnapshotPage, timeout_s=5.0)  # type: ignore[arg-type]
        assert caught.value.error.code is code
        assert await lookup(bus) == ()
    await bus.close()


async def test_two_registries_share_the_questions_and_one_leads(
    bus_maker: BusMaker, etcd_server: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    one_bus, two_bus, bus = await bus_maker(), await bus_maker(), await bus_maker()
    ear = Ear()
    await ear.listen(bus)
    heart = Heart(bus, pool_beat("kv-a", "a", 1))
    async with RunningRegistry(two_bus, tmp_path, etcd_server.url, prefix, "registry-2") as two:
        await until(lambda: two.leads)
        async with RunningRegistry(one_bus, tmp_path, etcd_server.url, prefix, "registry-1") as one:
            for number in range(20):
                await applied(bus, await publish(bus, registered("a", 1, number)))
            assert (one.leads, two.leads) == (False, True)
            # Once, or twice where it was first heard while the new leader said who was there.
            await until(lambda: ear.of("kv-a"))
            num_told = len(ear.of("kv-a"))
            await two.service.drain()
            await until(lambda: one.leads, what="the other one leads at once after a clean handover")
            assert not two.leads
            await applied(bus, await publish(bus, registered("a", 1, 99)))
            assert (await lookup(bus, 99))[0] == (placement("a", 1, 99),)
            await until(lambda: len(ear.of("kv-a")) > num_told, what="the new leader says again who is there")
    assert set(ear.of("kv-a")) == {MemberJoined(worker=WorkerId("kv-a"), node=NodeId("a"))}
    await heart.stop()


async def test_it_shows_in_the_services_api(etcd_server: EtcdServer, prefix: str, tmp_path: Path) -> None:
    bus = MemoryBus(MemoryBroker())
    async with RunningRegistry(bus, tmp_path, etcd_server.url, prefix):
        await lookup(bus, 1)
        reply = await bus.request("$SRV.STATS.halfmoon-registry", b"", timeout_s=5.0)
        assert b'"lookup"' in reply.data
        assert b'"num_requests":1' in reply.data.replace(b" ", b"")
    await bus.close()
