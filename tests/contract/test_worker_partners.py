"""Workers that can't pass KV to each other find out when they start, not at the first transfer."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import structlog

from halfmoon.bus.codec import encode
from halfmoon.bus.memory import MemoryBroker, MemoryBus
from halfmoon.lifecycle import Runtime, StartupError
from halfmoon.prefill.config import PrefillConfig
from halfmoon.prefill.service import Prefill
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import WorkerId
from halfmoon.schemas.members import MemberState
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.splits import Role
from halfmoon.tracing import setup
from halfmoon.tracing.metrics import Metrics
from support.conductors import FakeWorker, Stage
from support.exact_engine import ExactEngine
from support.pool_nodes import running_node
from support.wait import until

LISTEN_S = 0.3
BEAT_S = 0.05
"""Well below `LISTEN_S`: whoever is there is heard."""


class HalfPrecision(ExactEngine):
    """The same model, with KV of another type and in larger chunks."""

    @property
    def card(self) -> ModelCard:
        return msgspec.structs.replace(super().card, kv_dtype="bfloat16", chunk_tokens=16)


class Starting:
    """A prefill worker, and its process's part: heartbeats from the beginning."""

    def __init__(self, broker: MemoryBroker, folder: Path, engine: ExactEngine, *, allow_other_kv: bool) -> None:
        self.bus = MemoryBus(broker)
        self.service = Prefill(
            Runtime(
                service="prefill",
                worker_id=WorkerId("prefill-1"),
                config=PrefillConfig(
                    node="node-a", model=folder, listen_first_s=LISTEN_S, allow_other_kv=allow_other_kv
                ),
                bus=self.bus,
                telemetry=setup("prefill"),
                metrics=Metrics(),
                log=structlog.stdlib.get_logger("test"),
                started_ns=time.time_ns(),
                fail=lambda why: None,
            ),
            engine,
        )

    async def beat(self) -> None:
        while True:
            beat = self.service.heartbeat()
            await self.bus.publish(subjects.heartbeat(beat.worker), encode(beat))
            await asyncio.sleep(BEAT_S)


@asynccontextmanager
async def starting(
    broker: MemoryBroker, folder: Path, engine: ExactEngine, *, allow_other_kv: bool = False
) -> AsyncIterator[Prefill]:
    async with running_node(broker, folder, "node-a"):
        worker = Starting(broker, folder, engine, allow_other_kv=allow_other_kv)
        beating = asyncio.create_task(worker.beat())
        try:
            yield worker.service
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            await worker.service.stop()
            await worker.bus.close()


@pytest.fixture
async def decode() -> AsyncIterator[FakeWorker]:
    """A decode worker that serves `exact`."""
    worker = FakeWorker(MemoryBus(MemoryBroker()), "decode-1", Role.DECODE, "node-b", card=ExactEngine().card)
    await worker.start()
    yield worker
    await worker.die()
    await worker.bus.close()


@pytest.fixture
def broker(decode: FakeWorker) -> MemoryBroker:
    assert isinstance(decode.bus, MemoryBus)
    return decode.bus.broker


async def test_a_worker_that_nobody_could_work_with_does_not_start(
    broker: MemoryBroker, decode: FakeWorker, tmp_path: Path
) -> None:
    async with starting(broker, tmp_path, HalfPrecision()) as prefill:
        with pytest.raises(StartupError) as refusal:
            await prefill.start()
        assert prefill.heartbeat().state is MemberState.LOADING
    why = str(refusal.value)
    assert "kv_dtype is bfloat16 here, float32 there; chunk_tokens is 16 here, 8 there" in why
    assert "decode-1" in why
    assert "HALFMOON_PREFILL_ALLOW_OTHER_KV" in why


async def test_it_starts_where_that_is_wanted(broker: MemoryBroker, decode: FakeWorker, tmp_path: Path) -> None:
    async with starting(broker, tmp_path, HalfPrecision(), allow_other_kv=True) as prefill:
        await prefill.start()
        assert prefill.heartbeat().state is MemberState.SERVING


async def test_it_starts_where_one_of_its_kind_is_there(
    broker: MemoryBroker, decode: FakeWorker, tmp_path: Path
) -> None:
    like = FakeWorker(MemoryBus(broker), "decode-2", Role.DECODE, "node-b", card=HalfPrecision().card)
    await like.start()
    async with starting(broker, tmp_path, HalfPrecision()) as prefill:
        await prefill.start()
        assert prefill.heartbeat().state is MemberState.SERVING
    await like.die()
    await like.bus.close()


async def test_of_two_that_start_together_one_hears_the_other_before_it_serves(
    broker: MemoryBroker, decode: FakeWorker, tmp_path: Path
) -> None:
    """The other one has loaded its model, doesn't serve yet, and came first."""
    decode.state, decode.started_ns = MemberState.LOADING, 1
    async with starting(broker, tmp_path, HalfPrecision()) as prefill:
        start = asyncio.create_task(prefill.start())
        await until(lambda: prefill.heartbeat().card is not None)
        assert prefill.heartbeat().state is MemberState.LOADING
        with pytest.raises(StartupError, match="can't exchange"):
            await start


async def test_a_pair_that_fits_starts(broker: MemoryBroker, decode: FakeWorker, tmp_path: Path) -> None:
    async with starting(broker, tmp_path, ExactEngine()) as prefill:
        await prefill.start()
        assert prefill.heartbeat().state is MemberState.SERVING


async def test_the_conductor_counts_workers_without_a_partner() -> None:
    broker = MemoryBroker()

    async def make_bus() -> MemoryBus:
        return MemoryBus(broker)

    stage = await Stage(make_bus).open(("p1", Role.PREFILL, "node-a"), ("d1", Role.DECODE, "node-b"))
    name = "halfmoon_conductor_workers_without_partner"
    try:
        await until(lambda: len(stage.conductors[0].members.cluster().workers) == 2)
        other = msgspec.structs.replace(stage.workers["d1"].card or ExactEngine().card, layout="other.v1")
        await stage.add_worker("d2", Role.DECODE, "node-b", card=other)
        await until(lambda: stage.value(name) == 1)
        await stage.add_worker("p2", Role.PREFILL, "node-a", card=other)
        await until(lambda: stage.value(name) == 0)
    finally:
        await stage.close()
