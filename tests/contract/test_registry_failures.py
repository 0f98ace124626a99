"""etcd killed, etcd frozen, the leader killed, nothing there at the start: what the registry does about it."""

import asyncio
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from halfmoon.bus.endpoint import call
from halfmoon.bus.errors import RemoteError
from halfmoon.bus.memory import MemoryBroker, MemoryBus
from halfmoon.bus.nats import NatsBus, NatsSettings
from halfmoon.bus.protocol import Bus
from halfmoon.bus.streams import CHUNKS
from halfmoon.registry.etcd import Etcd
from halfmoon.registry.store import Store
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkPlacement
from halfmoon.schemas.registry import LookedUp, Lookup, MemberJoined
from halfmoon.schemas.wire import ErrorCode
from support.etcd import EtcdServer, free_port
from support.heart import Heart
from support.nats import NatsServer
from support.registry import (
    Ear,
    RunningRegistry,
    applied,
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
from support.registry_process import RegistryProcess
from support.wait import until, until_blocking

pytestmark = pytest.mark.etcd

PREFIX = "/halfmoon"


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    bus = MemoryBus(MemoryBroker())
    await bus.ensure_stream(CHUNKS)
    yield bus
    await bus.close()


class Load:
    """Registers two chunks and evicts the first of them, over and over; knows what should be left."""

    def __init__(self, bus: Bus) -> None:
        self.expected: set[ChunkPlacement] = set()
        self.last_seq = 0
        self._stopped = False
        self._task = asyncio.create_task(self._run(bus))

    async def _run(self, bus: Bus) -> None:
        number = 0
        while not self._stopped:
            await publish(bus, registered("a", 1, number, number + 1))
            self.last_seq = await publish(bus, evicted("a", 1, number))
            self.expected.add(placement("a", 1, number + 1))
            number += 2
            await asyncio.sleep(0.005)

    def has_passed(self, seq: int) -> bool:
        return self.last_seq > seq

    async def stop(self) -> None:
        self._stopped = True
        await self._task


async def all_is_there(bus: Bus, load: Load) -> None:
    await applied(bus, load.last_seq)
    placements, stream_seq, _ = await snapshot(bus)
    assert stream_seq == load.last_seq
    assert set(placements) == load.expected
    assert len(placements) == len(load.expected)


async def test_etcd_killed_and_started_again_under_load_loses_nothing(
    etcd_server: EtcdServer, bus: Bus, tmp_path: Path
) -> None:
    async with RunningRegistry(bus, tmp_path, etcd_server.url, PREFIX, leader_ttl_s=2):
        heart = Heart(bus, pool_beat("kv-a", "a", 1))
        load = Load(bus)
        for _ in range(2):
            seen = load.last_seq
            await applied(bus, seen + 10)
            await asyncio.to_thread(etcd_server.kill)
            seen = load.last_seq
            await until(partial(load.has_passed, seen + 50), what="the load goes on")
            await asyncio.to_thread(etcd_server.start)
        await load.stop()
        await all_is_there(bus, load)
        await heart.stop()


async def test_a_frozen_etcd_is_answered_for_in_time_and_nothing_is_lost_when_it_thaws(
    etcd_server: EtcdServer, bus: Bus, tmp_path: Path
) -> None:
    limit_s = 0.5
    async with RunningRegistry(
        bus, tmp_path, etcd_server.url, PREFIX, leader_ttl_s=2, lookup_timeout_s=limit_s
    ) as registry:
        heart = Heart(bus, pool_beat("kv-a", "a", 1))
        load = Load(bus)
        await applied(bus, load.last_seq + 10)
        assert registry.leads
        etcd_server.freeze()
        loop = asyncio.get_running_loop()

        async def ask() -> float:
            started_s = loop.time()
            with pytest.raises(RemoteError, match="no etcd answers at") as caught:
                await call(bus, subjects.registry("lookup"), Lookup(keys=(key(1),)), LookedUp, timeout_s=20.0)
            assert caught.value.error.code is ErrorCode.UNAVAILABLE
            return loop.time() - started_s

        durations_s = await asyncio.gather(*(ask() for _ in range(200)))
        assert max(durations_s) < 5 * limit_s, "a crowd of questions does not queue up behind the first"
        await until(lambda: not registry.leads, what="it steps down, since it can't renew its lease")
        etcd_server.thaw()
        await until(lambda: registry.leads, timeout_s=20.0, what="it leads again by itself")
        await load.stop()
        await all_is_there(bus, load)
        await heart.stop()


async def test_members_are_not_lost_because_etcd_was(etcd_server: EtcdServer, bus: Bus, tmp_path: Path) -> None:
    ear = Ear()
    await ear.listen(bus)
    async with RunningRegistry(bus, tmp_path, etcd_server.url, PREFIX, leader_ttl_s=2) as registry:
        heart = Heart(bus, pool_beat("kv-a", "a", 1))
        await applied(bus, await publish(bus, registered("a", 1, 1)))
        await until(lambda: ear.of("kv-a"))
        etcd_server.freeze()
        await until(lambda: not registry.leads)
        etcd_server.thaw()
        await until(lambda: registry.leads, timeout_s=20.0)
        await applied(bus, await publish(bus, registered("a", 1, 2)))
        assert await lookup(bus, 1, 2) == ((placement("a", 1, 1),), (placement("a", 1, 2),))
        assert {type(event) for event in ear.of("kv-a")} == {MemberJoined}
        await heart.stop()


@pytest.mark.nats
async def test_when_the_leading_process_is_killed_the_other_takes_over(
    etcd_server: EtcdServer, nats_server: NatsServer, tmp_path: Path
) -> None:
    settings = {
        "nats_url": nats_server.url,
        "registry_etcd_url": etcd_server.url,
        "registry_leader_ttl_s": "2",
    }
    processes = {name: RegistryProcess(tmp_path, name, **settings) for name in ("registry-1", "registry-2")}
    bus = await NatsBus.connect(NatsSettings(url=nats_server.url))
    etcd = Etcd((etcd_server.url.removeprefix("http://"),))
    store = Store(etcd, prefix=PREFIX, max_txn_ops=1024, write_timeout_s=5.0)
    ear = Ear()
    try:
        await ear.listen(bus)
        await bus.ensure_stream(CHUNKS)
        hearts = [Heart(bus, pool_beat("kv-a", "a", 1)), Heart(bus, pool_beat("kv-b", "b", 1))]
        load = Load(bus)

        async def somebody_leads() -> bool:
            return await store.leader(5.0) is not None

        async def both_are_there() -> bool:
            return {member.worker for member in (await store.members(5.0)).members} >= set(processes)

        await eventually(somebody_leads, 30.0)
        await eventually(both_are_there, 30.0)
        for beating in ("kv-a", "kv-b"):
            await until(partial(ear.of, beating), what=f"{beating} has been heard")
        await applied(bus, load.last_seq)
        first = await store.leader(5.0)
        assert first is not None
        (second,) = processes.keys() - {first}
        processes[first].end(signal.SIGKILL)
        await hearts[1].stop()

        async def the_other_leads() -> bool:
            return await store.leader(5.0) == second

        await eventually(the_other_leads, 15.0)
        for gone in (first, "kv-b"):
            await until(partial(ear.has_lost, gone), what=f"{gone} is lost")
        assert not ear.has_lost("kv-a")
        await load.stop()
        await all_is_there(bus, load)
        await hearts[0].stop()
        assert processes[second].end(signal.SIGTERM) == 0
        assert await store.leader(5.0) is None, "a clean stop hands the leadership on at once"
        assert "Traceback" not in processes[second].output
    finally:
        for process in processes.values():
            process.end(signal.SIGKILL)
        await etcd.close()
        await bus.close()


@pytest.mark.nats
def test_without_etcd_at_the_start_it_says_so_in_one_line_and_gives_up(nats_server: NatsServer, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    process = RegistryProcess(
        tmp_path,
        "registry-1",
        nats_url=nats_server.url,
        registry_etcd_url=f"http://{address}",
        registry_etcd_connect_timeout_s="1",
        log_level="error",
    )
    try:
        until_blocking(lambda: process.process.poll() is not None, timeout_s=30.0, what="it gives up")
        assert process.process.returncode == 2
        (line,) = process.output.splitlines()
        assert line.startswith(f"halfmoon registry: no etcd answers at {address} (")
        assert line.endswith("): start one or set HALFMOON_REGISTRY_ETCD_URL")
    finally:
        process.end(signal.SIGKILL)


@pytest.mark.nats
@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"registry_etcd_url": "localhost:2379"}, "is not an etcd address; write http://host:port"),
        (
            {"registry_etcd_url": "https://localhost:1", "registry_etcd_ca": "/nowhere.pem"},
            "/nowhere.pem can't be read",
        ),
        ({"registry_etcd_cert": "/nowhere.pem"}, "etcd_cert and etcd_key go together"),
    ],
)
def test_settings_that_cannot_work_are_one_line(
    nats_server: NatsServer, tmp_path: Path, settings: dict[str, str], complaint: str
) -> None:
    process = RegistryProcess(tmp_path, "registry-1", nats_url=nats_server.url, log_level="error", **settings)
    try:
        until_blocking(lambda: process.process.poll() is not None, timeout_s=30.0)
        (line,) = process.output.splitlines()
        assert complaint in line
        assert process.process.returncode == 2
    finally:
        process.end(signal.SIGKILL)
