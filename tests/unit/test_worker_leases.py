"""A request's leases end with it, also those whose answer came too late for it."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from halfmoon.bus.memory import MemoryBroker, MemoryBus
from halfmoon.bus.protocol import BusMessage
from halfmoon.pool import PoolClient
from halfmoon.schemas.ids import ModelName, TenantId, WorkerId
from halfmoon.worker import leases as worker_leases
from halfmoon.worker.leases import LeaseSet
from halfmoon.worker.makers import Makers
from support.pool_nodes import REQUEST, Node, running_node, slots_of, wanted_of
from support.wait import until


class SlowBus(MemoryBus):
    """Keeps the pool's answers to itself until it is told to hand them on."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.hands_on = asyncio.Event()
        self.num_kept = 0

    async def request(
        self, subject: str, data: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> BusMessage:
        answer = await super().request(subject, data, timeout_s=timeout_s, headers=headers)
        if subject.endswith(".acquire"):
            self.num_kept += 1
            await self.hands_on.wait()
        return answer


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def node(broker: MemoryBroker, tmp_path: Path) -> AsyncIterator[Node]:
    async with running_node(broker, tmp_path, "node-a") as running:
        yield running


@pytest.mark.parametrize("is_too_late", [False, True])
async def test_an_answer_after_the_request_has_ended_holds_nothing(
    node: Node, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch, is_too_late: bool
) -> None:
    monkeypatch.setattr(worker_leases, "SETTLE_TIMEOUT_S", 0.05 if is_too_late else 20.0)
    await node.client.release(await node.write("a"))
    bus = SlowBus(broker)
    client = PoolClient(bus, node.service.node, WorkerId("worker"))
    await client.describe()
    leases = LeaseSet(
        client,
        REQUEST,
        tenant=TenantId("default"),
        model=ModelName("m"),
        root=bytes(32),
        makers=Makers(),
        lease_s=0.5,
        deadline_ns=time.time_ns() + 30_000_000_000,
        timeout_s=30.0,
    )
    async with leases:
        asker = asyncio.create_task(leases.acquire(wanted_of("a"), keep=True))
        await until(lambda: bus.num_kept == 1)
        assert slots_of(node)[3] == 1
        asker.cancel()
        if not is_too_late:
            bus.hands_on.set()
    bus.hands_on.set()
    await until(lambda: slots_of(node) == (7, 0, 1, 0), what="it has been given back, or has expired")
    assert client.num_open_leases == 0
    await client.close()
