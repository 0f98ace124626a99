"""A thousand requests whose clients leave at random times: no process dies, and what they held is all given back."""

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from halfmoon.bus.codec import Decoder
from halfmoon.bus.endpoint import call
from halfmoon.bus.nats import NatsBus, NatsSettings
from halfmoon.bus.protocol import BusMessage
from halfmoon.client import GenerateClient
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import ModelName, NodeId, WorkerId
from halfmoon.schemas.members import Heartbeat, WorkerHeartbeat
from halfmoon.schemas.pool_stats import PoolStats, Stats
from halfmoon.schemas.requests import RequestSubmitted, Sampling
from support.system import System, free_port
from support.wait import until_awaited

pytestmark = pytest.mark.timeout(300)

MODEL = "SmolLM2-135M-Instruct"
AT_ONCE = 48
LONGEST_S = 0.8
"""A request that nobody aborts takes about half as long."""
SERVICES = (
    "registry",
    "kv-tier-node-a",
    "kv-tier-node-b",
    "conductor",
    "prefill-1",
    "prefill-2",
    "decode-1",
    "gateway",
)
NODES = (NodeId("node-a"), NodeId("node-b"))
FILES_BESIDE = 4
"""File descriptors that a process may have open at one moment and not at another, whatever it was asked."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a forgotten request would hold some of. Equal whenever nothing runs."""

    num_leases: int
    num_slots_in_use: int
    """Staged or leased."""
    num_running: int
    """Halves at workers, waiting ones included."""
    kv_tokens_in_use: int
    num_open_requests: int
    """At the conductor."""
    num_undelivered: int
    """Messages of the stream REQUESTS."""
    num_subscriptions: int
    num_etcd_keys: int
    """But for those of chunks that some pool holds."""


class Watcher:
    """Looks at a system from outside."""

    def __init__(self, system: System, bus: NatsBus, conductor_metrics: str) -> None:
        self._bus = bus
        self._metrics = conductor_metrics
        [ports] = (system.data_dir / "nats").glob("*.ports")
        self._nats: str = json.loads(ports.read_text())["monitoring"][0]
        self._etcd = next(
            found for line in system.output if (found := re.search(r"http://[\d.:]+$", _cell(line, "etcd")))
        )[0]
        self._pids = {name: system.pid(name) for name in SERVICES}
        self._beats: dict[WorkerId, WorkerHeartbeat] = {}
        self._decoder: Decoder[Heartbeat] = Decoder(Heartbeat)

    async def hear(self, message: BusMessage) -> None:
        beat = self._decoder.decode(message.data, message.headers)
        if isinstance(beat, WorkerHeartbeat):
            self._beats[beat.worker] = beat

    async def look(self) -> Resources:
        pools = [
            await call(self._bus, f"{subjects.kv_tier(node)}.stats", Stats(), PoolStats, timeout_s=10) for node in NODES
        ]
        async with httpx.AsyncClient(timeout=10) as http:
            every_key = {"key": "AA==", "range_end": "AA==", "count_only": True}
            keys = (await http.post(f"{self._etcd}/v3/kv/range", json=every_key)).json()
            subscriptions = (await http.get(f"{self._nats}/subsz")).json()
            [account] = (await http.get(f"{self._nats}/jsz?streams=true")).json()["account_details"]
            metrics = (await http.get(self._metrics)).text
        open_requests = re.search(r"^halfmoon_conductor_open_requests (\S+)$", metrics, re.MULTILINE)
        assert open_requests is not None
        beats = self._beats.values()
        return Resources(
            num_leases=sum(pool.num_leases for pool in pools),
            num_slots_in_use=sum(pool.staged + pool.leased for pool in pools),
            num_running=sum(beat.num_running + beat.num_waiting for beat in beats),
            kv_tokens_in_use=sum(beat.total_tokens - beat.free_tokens for beat in beats),
            num_open_requests=int(float(open_requests[1])),
            num_undelivered=next(
                stream["state"]["messages"]
                for stream in account["stream_detail"]
                if stream["name"] == subjects.REQUESTS_STREAM
            ),
            num_subscriptions=subscriptions["num_subscriptions"],
            num_etcd_keys=int(keys["count"]) - sum(pool.num_chunks for pool in pools),
        )

    def open_files(self) -> dict[str, int]:
        """File descriptors of each service, sockets among them. Raises FileNotFoundError where one has died."""
        return {name: len(list(Path(f"/proc/{pid}/fd").iterdir())) for name, pid in self._pids.items()}


def _cell(line: str, name: str) -> str:
    """The last cell of this process's line in the table that `halfmoon up` shows."""
    cells = [cell.strip() for cell in line.replace("┃", "│").split("│")]
    return cells[-2] if len(cells) > 3 and cells[1] == name else ""


@asynccontextmanager
async def watched(system: System, conductor_metrics: str) -> AsyncIterator[tuple[Watcher, NatsBus]]:
    bus = await NatsBus.connect(NatsSettings(url=system.nats_url, name="test"))
    try:
        watcher = Watcher(system, bus, conductor_metrics)
        await bus.subscribe(subjects.HEARTBEAT_ALL, watcher.hear)
        yield watcher, bus
    finally:
        await bus.close()


class Leaver:
    """Asks in each of three ways, for a prompt that may begin as another, and leaves."""

    def __init__(self, http: httpx.AsyncClient, client: GenerateClient, seed: int) -> None:
        self._http = http
        self._client = client
        self._random = random.Random(seed)
        self.num_left = 0

    async def many(self, count: int) -> None:
        """Until this many have left."""
        turns = asyncio.Semaphore(AT_ONCE)
        goal = self.num_left + count

        async def one() -> None:
            async with turns:
                if self.num_left < goal:
                    await self._ask()

        while self.num_left < goal:
            async with asyncio.TaskGroup() as group:
                for _ in range(goal - self.num_left):
                    group.create_task(one())

    async def _ask(self) -> None:
        tokens = tuple(
            [self._random.randrange(20)] * 64 + self._random.choices(range(1000), k=self._random.randrange(200))
        )
        ways = (self._in_one_piece, self._streamed, self._over_nats)
        way = self._random.choice(ways)
        try:
            async with asyncio.timeout(self._random.uniform(0.0, LONGEST_S)):
                await way(tokens)
        except TimeoutError:
            self.num_left += 1

    def _body(self, tokens: tuple[int, ...], *, stream: bool) -> dict[str, object]:
        return {"model": MODEL, "prompt": list(tokens), "max_tokens": 16, "ignore_eos": True, "stream": stream}

    async def _in_one_piece(self, tokens: tuple[int, ...]) -> None:
        await self._http.post("/v1/completions", json=self._body(tokens, stream=False))

    async def _streamed(self, tokens: tuple[int, ...]) -> None:
        async with self._http.stream("POST", "/v1/completions", json=self._body(tokens, stream=True)) as answer:
            async for _ in answer.aiter_lines():
                pass

    async def _over_nats(self, tokens: tuple[int, ...]) -> None:
        request = RequestSubmitted(
            model=ModelName(MODEL), tokens=tokens, sampling=Sampling(max_tokens=16, ignore_eos=True)
        )
        async with aclosing(self._client.submit(request, deadline_ns=time.time_ns() + 60_000_000_000)) as events:
            async for _ in events:
                pass


async def settled(watcher: Watcher) -> Resources:
    """What there is once nothing runs."""
    seen: list[Resources] = []

    async def is_still() -> bool:
        seen.append(await watcher.look())
        last = seen[-1]
        return seen[-2:] == [last, last] and last.num_leases == last.num_running == last.num_open_requests == 0

    await until_awaited(is_still, 30, what="idle")
    return seen[-1]


@pytest.mark.parametrize("num_aborts", [200, pytest.param(1000, marks=pytest.mark.nightly)])
async def test_aborts_leave_nothing_behind(model: Path, tmp_path: Path, num_aborts: int) -> None:
    port = free_port()
    system = await asyncio.to_thread(
        System.start,
        tmp_path / "data",
        model,
        *("--engine=sim", "--arena-mib=16", "--chunk-tokens=64", "--prefill=2"),
        environ={"HALFMOON_CONDUCTOR_METRICS_PORT": str(port)},
    )
    try:
        async with (
            watched(system, f"http://127.0.0.1:{port}/metrics") as (watcher, bus),
            GenerateClient(bus) as client,
        ):
            async with httpx.AsyncClient(base_url=system.url, timeout=None) as http:
                await Leaver(http, client, seed=1).many(30)
            before = await settled(watcher)
            files = watcher.open_files()
            async with httpx.AsyncClient(base_url=system.url, timeout=None) as http:
                await Leaver(http, client, seed=2).many(num_aborts)
            after = before

            async def is_back() -> bool:
                nonlocal after
                after = await watcher.look()
                return after == before

            with suppress(AssertionError):
                await until_awaited(is_back, 30)
            assert after == before
            assert (before.num_slots_in_use, before.kv_tokens_in_use, before.num_undelivered) == (0, 0, 0)
            now = watcher.open_files()
            assert {name: now[name] - files[name] for name in now if now[name] > files[name] + FILES_BESIDE} == {}
            assert client.num_open == 0
        assert not [line for line in system.output if "starting it again" in line]
    finally:
        stopped = await asyncio.to_thread(system.stop)
    assert stopped == 0
