"""The whole system under load while its processes are killed or stand still: every answer is right or a clean error,
there is exactly one, and in the end all is as it was.

Two minutes of random faults, by the same seed in each run. `make soak` goes on for ten, with others each time;
HALFMOON_SOAK_SEED repeats those of a run.
"""

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import nats.errors
import pytest
from nats.js import JetStreamContext

from halfmoon.bus.endpoint import call
from halfmoon.bus.errors import BusError
from halfmoon.bus.nats import NatsBus, NatsSettings
from halfmoon.cli.up.plan import UpOptions
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import NodeId
from halfmoon.schemas.members import MEMBER_LOST_AFTER_S
from halfmoon.schemas.pool_stats import PoolStats, Stats
from support.faults import Another, Faults, processes_of
from support.load import Load, load_on
from support.registry import etcd_agrees, eventually, snapshot
from support.system import System
from support.wait import until, until_awaited, until_blocking

SECONDS = float(os.environ.get("HALFMOON_SOAK_S", "120"))
SEED = int(os.environ.get("HALFMOON_SOAK_SEED", "1"))

pytestmark = [pytest.mark.timeout(SECONDS + 300), pytest.mark.model]

MODEL, VOCAB_SIZE = "SmolLM2-135M-Instruct", 49_152
NODES = ("node-a", "node-b")
OPTIONS = ("--engine=sim", "--chunk-tokens=64", "--arena-mib=1", "--ssd-mib=8", "--prefill=2", "--decode=2")
"""Chunks of 4 KiB, of which a node's memory holds 256: most of what is asked for has been evicted from there."""
NUM_CLIENTS = 8
MAX_GROWTH_BYTES = 48 << 20
MAX_MORE_FILES = 12
"""Open in a process: connections to workers that were started again are made before the old ones are given up."""


@pytest.fixture(scope="module")
def system(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    transport = "--transport=tcp" if SEED % 2 else "--transport=auto"
    system = System.start(tmp_path_factory.mktemp("soak"), model, *OPTIONS, transport)
    yield system
    shm_dir = UpOptions(model=Path(), model_name="", data_dir=system.data_dir).shm_dir
    assert system.stop() == 0
    assert not shm_dir.exists()
    assert not processes_of(system)
    assert not list((system.data_dir / "ssd").rglob("*.new"))


@pytest.fixture
async def bus(system: System) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(NatsSettings(url=system.nats_url, name="test"))
    yield bus
    await bus.close()


@dataclass(frozen=True)
class State:
    """What a system has when nothing is asked of it."""

    slots: dict[str, int]
    """Of each pool, all there are."""
    shared: list[str]
    """Names in the folder of shared memory, without the epochs at their ends."""
    num_consumers: dict[str, int]
    """Of each stream."""
    num_subscriptions: int
    num_etcd_keys: int
    """But for those of chunks."""
    num_files: dict[int, int]
    """Open ones, by process."""
    resident_bytes: dict[int, int]

    @classmethod
    async def of(cls, system: System, bus: NatsBus, streams: JetStreamContext) -> "State":
        """Once nothing is leased, half written or queued any more, and etcd agrees with the pools."""
        await until_awaited(lambda: _is_idle(bus, streams), 40, what="all slots and leases are given back")
        for node in NODES:
            await eventually(lambda node=node: etcd_agrees(bus, node), 40, what=f"etcd agrees with {node}")  # type: ignore[misc]
        shm_dir = UpOptions(model=Path(), model_name="", data_dir=system.data_dir).shm_dir
        names = (subjects.REQUESTS_STREAM, subjects.CHUNKS_STREAM)
        info = {name: (await streams.stream_info(name)).state for name in names}
        assert info[subjects.REQUESTS_STREAM].messages == 0
        pids = [pid for name, pid in processes_of(system).items() if name not in ("nats", "etcd")]
        return cls(
            slots={node: (await _stats(bus, node)).total for node in NODES},
            shared=sorted(path.name.rstrip("0123456789") for path in shm_dir.iterdir()),
            num_consumers={name: info[name].consumer_count for name in names},
            num_subscriptions=await _num_subscriptions(system),
            num_etcd_keys=await _num_etcd_keys(system, bus),
            num_files={pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in pids},
            resident_bytes={pid: _resident_bytes(pid) for pid in pids},
        )

    def check_is_back(self, before: "State") -> None:
        assert self.slots == before.slots
        assert self.shared == before.shared
        assert self.num_consumers == before.num_consumers
        assert self.num_subscriptions == before.num_subscriptions
        assert self.num_etcd_keys == before.num_etcd_keys
        for pid in self.num_files.keys() & before.num_files.keys():
            name = Path(f"/proc/{pid}/environ").read_text().partition("HALFMOON_WORKER_ID=")[2].partition("\0")[0]
            assert self.num_files[pid] <= before.num_files[pid] + MAX_MORE_FILES, name
            assert self.resident_bytes[pid] <= before.resident_bytes[pid] + MAX_GROWTH_BYTES, name


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _num_subscriptions(system: System) -> int:
    [ports] = (system.data_dir / "nats").glob("*.ports")
    async with httpx.AsyncClient(timeout=10) as http:
        answer = await http.get(f"{json.loads(ports.read_text())['monitoring'][0]}/subsz")
    return int(answer.json()["num_subscriptions"])


async def _num_etcd_keys(system: System, bus: NatsBus) -> int:
    url = next(found for line in system.output if "etcd" in line and (found := re.search(r"http://[\d.:]+", line)))[0]
    every_key = {"key": "AA==", "range_end": "AA==", "count_only": True}
    async with httpx.AsyncClient(timeout=10) as http:
        count = int((await http.post(f"{url}/v3/kv/range", json=every_key)).json()["count"])
    placements, _, _ = await snapshot(bus)
    return count - len(placements)


async def _stats(bus: NatsBus, node: str) -> PoolStats:
    return await call(bus, f"{subjects.kv_tier(NodeId(node))}.stats", Stats(), PoolStats, timeout_s=5)


async def _is_idle(bus: NatsBus, streams: JetStreamContext) -> bool:
    try:
        pools = [await _stats(bus, node) for node in NODES]
        queue = await streams.stream_info(subjects.REQUESTS_STREAM)
    except (BusError, TimeoutError, nats.errors.Error):
        return False
    for pool in pools:
        assert pool.free + pool.staged + pool.ready + pool.leased + pool.pinned == pool.total
    return queue.state.messages == 0 and all((pool.staged, pool.leased, pool.num_leases) == (0, 0, 0) for pool in pools)


async def _all_is_well(load: Load) -> None:
    """Ten answers in a row are right."""
    in_a_row = 0
    deadline_s = time.monotonic() + 60
    while in_a_row < 10:
        asked = await load.ask()
        in_a_row = in_a_row + 1 if asked.outcome == "finished" else 0
        assert time.monotonic() < deadline_s, load.outcomes()
        if not in_a_row:
            await asyncio.sleep(0.2)


@pytest.mark.parametrize("server", ["nats", "etcd"])
async def test_a_server_that_stands_still_for_ten_seconds_costs_no_answer_its_truth(
    system: System, bus: NatsBus, server: str
) -> None:
    async with load_on(system.nats_url, MODEL, VOCAB_SIZE, SEED) as load:
        load.start(NUM_CLIENTS)
        await until(lambda: load.num_finished > 20, 30)
        with Faults(system, SEED).standing_still(server):
            before = load.num_finished
            await asyncio.sleep(10.0)  # what the test is about
            if server == "etcd":
                assert load.num_finished > before + 20, "serving goes on from the indexes"
        before = load.num_finished
        await until(lambda: load.num_finished > before + 20, 60, what="it serves on")
        await load.stop()
        await _all_is_well(load)
        load.check()
        assert load.num_finished > 0.8 * len(load.asked), load.outcomes()
        await State.of(system, bus, load.connection.jetstream())


async def test_a_decode_worker_that_stood_still_says_nothing_more_of_what_others_took_over(
    system: System, bus: NatsBus
) -> None:
    async with load_on(system.nats_url, MODEL, VOCAB_SIZE, SEED) as load:
        load.start(NUM_CLIENTS)
        await until(lambda: load.num_finished > 20, 30)
        for worker in ("decode-1", "decode-2"):
            with Faults(system, SEED).standing_still(worker):
                await asyncio.sleep(2 * MEMBER_LOST_AFTER_S)  # what the test is about
            before = load.num_finished
            await until(lambda before=before: load.num_finished > before + 20, 60)  # type: ignore[misc]
        await load.stop()
        load.check()
        assert load.outcomes()["finished"] == len(load.asked), load.outcomes()
        await State.of(system, bus, load.connection.jetstream())


async def test_random_faults_under_load_leave_all_as_it_was(system: System, bus: NatsBus) -> None:
    others = [Another(system, "conductor", "conductor-2"), Another(system, "registry", "registry-2")]
    faults = Faults(system, SEED, others)
    try:
        async with load_on(system.nats_url, MODEL, VOCAB_SIZE, SEED) as load:
            streams = load.connection.jetstream()
            until_blocking(lambda: all("started" in other.log for other in others), 60)
            load.start(NUM_CLIENTS, cancel_share=0.1)
            await until(lambda: load.num_finished > 100, 60)
            await load.stop()
            before = await State.of(system, bus, streams)
            load.start(NUM_CLIENTS, cancel_share=0.1)
            await faults.run(SECONDS)
            await load.stop()
            await _all_is_well(load)
            load.check()

            async def has_what_it_had() -> bool:
                """Also that which was killed last serves again."""
                now = await _num_subscriptions(system), await _num_etcd_keys(system, bus)
                return now == (before.num_subscriptions, before.num_etcd_keys)

            await eventually(has_what_it_had, 60, what="as many subscriptions and keys as before")
            (await State.of(system, bus, streams)).check_is_back(before)
            assert load.num_finished > 0.5 * len(load.asked), load.outcomes()
    finally:
        print(f"seed {SEED}, {SECONDS:g} s: {dict(load.outcomes())}", *faults.told, sep="\n")
        for other in others:
            other.stop()
