"""What is used often outlives its node: pools as real processes, on a real broker and etcd; one of them is killed."""

import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from halfmoon.bus.endpoint import call
from halfmoon.bus.protocol import Bus
from halfmoon.chunks.checksum import checksum
from halfmoon.chunks.keys import Namespace, chunk_keys
from halfmoon.pool import PoolClient
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkMeta, ChunkOutcome, ChunkPlacement
from halfmoon.schemas.ids import ChunkKey, NodeId, RequestId, WorkerId
from halfmoon.schemas.kv_tier import ChunkSource, NewChunk, WantedChunk, WrittenChunk
from halfmoon.schemas.orders import PinOrder
from halfmoon.schemas.registry import LookedUp, Lookup, Pin, PinsChanged
from halfmoon.schemas.requests import RequestSubmitted
from halfmoon.schemas.splits import Role
from support.buses import BusMaker
from support.conductors import CARD, MODEL, Stage
from support.etcd import EtcdServer
from support.kv_tier_process import KvTierProcess
from support.nats import NatsServer
from support.registry import RunningRegistry, eventually

pytestmark = [pytest.mark.nats, pytest.mark.etcd, pytest.mark.timeout(300)]

PINNED = ChunkKey(b"pinned and never asked for......")
PROMPT = tuple(range(1, 70))
KEYS = chunk_keys(Namespace.of(CARD, tenant_salt="default").root(), PROMPT, CARD.chunk_tokens)
CHUNK_BYTES = CARD.chunk_tokens * CARD.kv_bytes_per_token
RACKS = {"node-a": "1", "node-b": "1", "node-c": "2"}


@pytest.fixture
def pools(tmp_path: Path, nats_server: NatsServer) -> Iterator[dict[str, KvTierProcess]]:
    """Three nodes of as many hosts, two of them in one rack."""
    shm_dir = tmp_path / "shm"
    shm_dir.mkdir()
    started = {
        node: KvTierProcess(
            tmp_path / "data",
            nats_server.url,
            node,
            host=node,
            labels=f'{{"rack": "{rack}"}}',
            shm_dir=str(shm_dir),
            copy_share="1.0",
        )
        for node, rack in RACKS.items()
    }
    yield started
    for process in started.values():
        process.close()


@pytest.fixture
async def stage(nats_buses: BusMaker, etcd_server: EtcdServer, tmp_path: Path) -> AsyncIterator[Stage]:
    """A registry, a conductor that makes a copy after a few uses, and workers that only pretend to compute."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(
            RunningRegistry(await nats_buses(), tmp_path / "registry", etcd_server.url, "/copies/")
        )
        opened = Stage(nats_buses)
        stack.push_async_callback(opened.close)
        await opened.add_worker("p1", Role.PREFILL, "node-a", finishes=True)
        await opened.add_worker("d1", Role.DECODE, "node-b", finishes=True)
        yield await opened.open(uses_per_copy=4.0, max_replicas=2, replicate_every_s=0.1)


async def lookup(bus: Bus, keys: Sequence[ChunkKey]) -> tuple[tuple[ChunkPlacement, ...], ...]:
    found = await call(bus, subjects.registry("lookup"), Lookup(keys=tuple(keys)), LookedUp, timeout_s=5)
    return found.placements


async def holders(bus: Bus, keys: Sequence[ChunkKey] = KEYS) -> set[tuple[NodeId, ...]]:
    """As the registry knows them: one element where it is the same for all chunks."""
    return {tuple(sorted(each.node for each in placements)) for placements in await lookup(bus, keys)}


def payload_of(key: ChunkKey) -> bytes:
    return key * (CHUNK_BYTES // len(key))


async def write(client: PoolClient, keys: Sequence[ChunkKey]) -> None:
    """A prompt's whole chunks, as a prefill worker leaves them."""
    new = [
        NewChunk(key=key, index=at, num_tokens=CARD.chunk_tokens, num_bytes=CHUNK_BYTES) for at, key in enumerate(keys)
    ]
    reserved = await client.reserve(RequestId("req-maker"), new)
    written: list[WrittenChunk] = []
    for at, chunk in enumerate(reserved.chunks):
        assert chunk.slot is not None
        payload = client.payload(chunk.slot)
        payload[:] = payload_of(chunk.key)
        meta = ChunkMeta(
            key=chunk.key,
            index=at,
            num_tokens=CARD.chunk_tokens,
            num_bytes=CHUNK_BYTES,
            checksum=checksum(payload),
            request_id=RequestId("req-maker"),
            created_ns=time.time_ns(),
            parent=keys[at - 1] if at else None,
        )
        written.append(WrittenChunk(slot=chunk.slot.slot, generation=chunk.slot.generation, meta=meta))
    await client.commit(reserved.lease_id, written)
    await client.release(reserved.lease_id)


async def test_what_is_hot_or_pinned_survives_the_node_that_made_it(
    pools: dict[str, KvTierProcess], stage: Stage, nats_buses: BusMaker
) -> None:
    bus = await nats_buses()
    clients = {node: PoolClient(bus, NodeId(node), WorkerId(f"worker-{node}")) for node in RACKS}
    for client in clients.values():
        await client.wait_ready(40)
    await write(clients["node-a"], KEYS)
    await write(clients["node-a"], [PINNED])
    pin = Pin(chunks=(PinOrder(key=PINNED),))
    await call(bus, subjects.registry("pin"), pin, PinsChanged, timeout_s=10)
    await eventually(lambda: _is(holders(bus), {("node-a",)}), what="the maker's copy is known")

    sent = 0

    async def is_copied() -> bool:
        nonlocal sent
        sent += 1
        await stage.client.submit(RequestSubmitted(request_id=RequestId(f"req-{sent}"), model=MODEL, tokens=PROMPT))
        return await holders(bus) == {("node-a", "node-c")}

    await eventually(is_copied, what="used again and again, it is copied to the other rack")
    before = sent
    await eventually(lambda: _and(is_copied(), lambda: sent >= before + 20), what="it is asked for on")
    await eventually(
        lambda: _is(holders(bus), {("node-a", "node-c")}), what="and there are no more copies than the bound"
    )

    await eventually(
        lambda: _is(holders(bus, [PINNED]), {("node-a", "node-c")}), 40, what="the pinned one is copied too"
    )

    pools["node-a"].signal(signal.SIGKILL)
    pools["node-a"].wait()
    await eventually(
        lambda: _is(holders(bus, (*KEYS, PINNED)), {("node-c",)}), what="the lost node's copies are known to be gone"
    )
    wanted = [
        WantedChunk(
            key=placements[0].chunk.key,
            index=at,
            num_tokens=CARD.chunk_tokens,
            num_bytes=CHUNK_BYTES,
            sources=tuple(ChunkSource(node=each.node, epoch=each.epoch) for each in placements),
        )
        for at, placements in enumerate(await lookup(bus, (*KEYS, PINNED)))
    ]
    acquired = await clients["node-b"].acquire(RequestId("req-reader"), wanted)
    assert [(chunk.outcome, chunk.source) for chunk in acquired.chunks] == [(ChunkOutcome.HIT_REMOTE, "node-c")] * 5
    for chunk in acquired.chunks:
        assert chunk.slot is not None
        assert bytes(clients["node-b"].payload(chunk.slot)) == payload_of(chunk.key)
    assert stage.value("halfmoon_conductor_copies_ordered_total", {"cause": "demand", "answer": "taken"}) == 4
    for client in clients.values():
        await client.close()


async def _and(asking: Awaitable[object], is_enough: Callable[[], bool]) -> bool:
    await asking
    return is_enough()


async def _is(asking: Awaitable[object], expected: object) -> bool:
    found = await asking
    return found == expected
