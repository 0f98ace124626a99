"""What engines hold in their prefix caches, on both buses: told, heard, planned with, and used."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from halfmoon.bus.codec import Decoder, encode
from halfmoon.bus.endpoint import call
from halfmoon.bus.protocol import BusMessage
from halfmoon.chunks.keys import Namespace, chunk_keys
from halfmoon.engine.contract import HotChanges
from halfmoon.schemas import subjects
from halfmoon.schemas.caches import CacheChanges, CacheSnapshot, WorkerCache
from halfmoon.schemas.ids import ChunkKey, ModelName, RequestId, TenantId, WorkerId
from halfmoon.schemas.orders import FlushOrder, Forget, Forgotten, Selection
from halfmoon.schemas.requests import RequestSubmitted, Sampling
from halfmoon.schemas.splits import Role
from halfmoon.schemas.wire import HEADER_REPLY
from support.buses import BusMaker
from support.conductors import CARD, MODEL, SPLIT_PAIR, FakeWorker, Stage, conductor_on
from support.exact_engine import CHUNK_TOKENS, ExactEngine, reference
from support.wait import until
from support.workers import DECODE, ROOT, SEED, Cluster, Reader, cluster, prompt

PROMPT = tuple(range(1, 70))
KEYS = chunk_keys(Namespace.of(CARD, tenant_salt="default").root(), PROMPT, CARD.chunk_tokens)
ALL_HOT = {"halfmoon.schedule.prefill_hot_chunks": 0, "halfmoon.schedule.decode_hot_chunks": len(KEYS)}


class Teller:
    """Says what a fake worker's engine holds, numbered as a worker does."""

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker
        self.seq = 0

    async def snapshot(self, *keys: ChunkKey) -> None:
        self.seq += 1
        message = CacheSnapshot(
            worker=self.worker.worker, started_ns=self.worker.started_ns, seq=self.seq, keys=tuple(keys)
        )
        await self._say(message)

    async def changes(self, *added: ChunkKey, removed: tuple[ChunkKey, ...] = ()) -> None:
        self.seq += 1
        message = CacheChanges(
            worker=self.worker.worker,
            started_ns=self.worker.started_ns,
            seq=self.seq,
            added=tuple(added),
            removed=removed,
        )
        await self._say(message)

    async def _say(self, message: WorkerCache) -> None:
        await self.worker.bus.publish(subjects.cache(self.worker.worker), encode(message))


class Placed:
    """Sends requests with one prompt through a stage's conductor; tells who got the halves."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.number = 0

    async def decode_half_of(self) -> str | None:
        """The prefill worker that the next request's decode half names."""
        self.number += 1
        name = RequestId(f"req-{self.number}")
        await self.stage.client.submit(RequestSubmitted(request_id=name, model=MODEL, tokens=PROMPT))
        decodes = self.stage.workers["d1"].decodes
        await until(lambda: any(half.request_id == name for half in decodes), what=name)
        return next(half.prefill_worker for half in decodes if half.request_id == name)

    def known(self, worker: str = "d1") -> int | None:
        return self.stage.conductors[0].hot.num_chunks().get(WorkerId(worker))


@pytest.fixture
async def placed(bus_maker: BusMaker) -> AsyncIterator[Placed]:
    stage = await Stage(bus_maker).open(*SPLIT_PAIR)
    yield Placed(stage)
    await stage.close()


async def test_a_conductor_hears_what_is_hot_and_routes_by_it(placed: Placed) -> None:
    stage = placed.stage
    decode, teller = stage.workers["d1"], Teller(stage.workers["d1"])
    assert await placed.decode_half_of() == "p1"
    await teller.snapshot(*KEYS[:3])
    await teller.changes(KEYS[3], removed=(KEYS[0],))
    await until(lambda: placed.known() == 3)
    assert await placed.decode_half_of() == "p1"
    await teller.changes(KEYS[0])
    await until(lambda: placed.known() == 4)
    num_prefills = len(stage.workers["p1"].prefills)
    assert await placed.decode_half_of() is None
    assert len(stage.workers["p1"].prefills) == num_prefills
    assert decode.decodes[-1].num_hot == 4

    def has_been_traced() -> bool:
        spans = [span for span in stage.spans[0].get_finished_spans() if span.name == "conductor.schedule"]
        return any(ALL_HOT.items() <= dict(span.attributes or {}).items() for span in spans)

    await until(has_been_traced)
    await until(lambda: stage.value("halfmoon_conductor_hot_chunks", {"worker": "d1"}) == 4)
    assert stage.value("halfmoon_conductor_hits_total", {"tier": "hbm"}) == 4


async def test_prefill_halves_name_what_is_hot_in_prefill(placed: Placed) -> None:
    teller = Teller(placed.stage.workers["p1"])
    await teller.snapshot(*KEYS[:2])
    await until(lambda: placed.known("p1") == 2)
    assert await placed.decode_half_of() == "p1"
    await until(lambda: bool(placed.stage.workers["p1"].prefills))
    half = placed.stage.workers["p1"].prefills[0]
    assert (half.num_hot, half.reuse) == (2, ())


async def test_from_a_missed_message_on_there_is_no_credit_until_a_snapshot(placed: Placed) -> None:
    teller = Teller(placed.stage.workers["d1"])
    await teller.snapshot(*KEYS)
    await until(lambda: placed.known() == 4)
    teller.seq += 1  # one is lost
    await teller.changes(KEYS[0])
    await until(lambda: placed.known() == 0)
    assert await placed.decode_half_of() == "p1"
    await teller.changes(*KEYS)
    await teller.snapshot(*KEYS[:3])
    await until(lambda: placed.known() == 3)
    await teller.changes(KEYS[3])
    await until(lambda: placed.known() == 4)
    assert await placed.decode_half_of() is None


async def test_a_life_that_has_ended_leaves_no_credit(placed: Placed) -> None:
    stage = placed.stage
    worker = stage.workers["d1"]
    await Teller(worker).snapshot(*KEYS)
    await until(lambda: placed.known() == 4)
    await worker.die()
    started_ns = worker.started_ns
    await worker.rise()
    await until(lambda: placed.known() is None)
    assert await placed.decode_half_of() == "p1"
    late = CacheSnapshot(worker=worker.worker, started_ns=started_ns, seq=2, keys=tuple(KEYS))
    await worker.bus.publish(subjects.cache(worker.worker), encode(late))
    new = Teller(worker)
    await new.snapshot(KEYS[0])
    await until(lambda: placed.known() == 1)
    await worker.leave()
    await until(lambda: placed.known() is None)
    await until(lambda: stage.value("halfmoon_conductor_hot_chunks", {"worker": "d1"}) == 0)


async def test_what_is_no_message_is_counted(placed: Placed) -> None:
    stage = placed.stage
    await stage.client.bus.publish(subjects.cache(WorkerId("d1")), b"\xc1")
    await until(lambda: stage.value("halfmoon_conductor_undecodable_total") == 1)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as running:
        yield running


def keys_of(tokens: list[int], *, tenant: str = "default") -> list[ChunkKey]:
    root = Namespace.of(ExactEngine().card, tenant_salt=tenant).root()
    return chunk_keys(root, tokens, CHUNK_TOKENS)


async def test_workers_tell_what_their_engines_hold(pair: Cluster) -> None:
    heard: list[WorkerCache] = []
    decoder: Decoder[WorkerCache] = Decoder(WorkerCache)

    async def hear(message: BusMessage) -> None:
        heard.append(decoder.decode(message.data, message.headers))

    await pair.bus.subscribe(subjects.CACHE_ALL, hear)
    one, two, three = keys_of(prompt(3 * CHUNK_TOKENS))
    pair.decode_engine.changes.append(HotChanges(frozenset({one, two})))
    await until(lambda: len(heard) == 1)
    pair.decode_engine.changes.append(HotChanges(frozenset({three}), frozenset({one})))
    await until(lambda: len(heard) == 2)
    started_ns = pair.decode.heartbeat().started_ns
    assert heard == [
        CacheSnapshot(worker=DECODE, started_ns=started_ns, seq=1, keys=tuple(sorted((one, two)))),
        CacheChanges(worker=DECODE, started_ns=started_ns, seq=2, added=(three,), removed=(one,)),
    ]


async def test_a_flush_makes_the_engine_forget_and_the_conductors_with_it(pair: Cluster) -> None:
    heard: list[WorkerCache] = []
    decoder: Decoder[WorkerCache] = Decoder(WorkerCache)

    async def hear(message: BusMessage) -> None:
        heard.append(decoder.decode(message.data, message.headers))

    await pair.bus.subscribe(subjects.CACHE_ALL, hear)
    keys = keys_of(prompt(2 * CHUNK_TOKENS))
    pair.decode_engine.num_hot = 2 * CHUNK_TOKENS
    pair.decode_engine.changes.append(HotChanges(frozenset(keys)))
    await until(lambda: len(heard) == 1)
    order = FlushOrder(seq=7, before_ns=1, selection=Selection(everything=True))
    forgotten = await call(pair.bus, subjects.forget(DECODE), Forget(order=order), Forgotten, timeout_s=5.0)
    assert forgotten == Forgotten(worker=DECODE, num_chunks=2)
    assert pair.decode_engine.num_hot == 0
    assert pair.decode.heartbeat().orders_seq == 7
    await until(lambda: len(heard) == 2)
    assert isinstance(heard[1], CacheChanges)
    assert set(heard[1].removed) == set(keys)


async def test_a_flush_of_a_tenant_forgets_the_roots_that_may_hold_what_was_computed_for_it(pair: Cluster) -> None:
    """Also where another tenant, of the same salt, has brought it into this engine."""
    tokens = prompt(2 * CHUNK_TOKENS + 1)
    lent, _ = pair.halves(tokens)
    await pair.send_prefill(lent)
    slots = pair.node_a.service.store.ledger.slots
    await until(lambda: slots.num_registered == 2)
    await pair.cancel(lent.request_id)
    await pair.idle()
    borrowed, half = pair.halves(tokens, reuse=[(pair.node_a.source,)] * 2)
    borrowed = msgspec.structs.replace(borrowed, tenant=TenantId("borrower"))
    half = msgspec.structs.replace(half, tenant=TenantId("borrower"))
    reader = await pair.listen(half.reply)
    await pair.send_prefill(borrowed)
    await pair.send_decode(half)
    await reader.finished()
    await pair.idle()

    asked = [
        Selection(tenant=TenantId("stranger")),
        Selection(tenant=TenantId("borrower")),
        Selection(tenant=TenantId("default")),
        Selection(tenant=TenantId("default"), model=ModelName("another")),
        Selection(tenant=TenantId("default"), prefixes=(KEYS[0],)),
        Selection(prefixes=(KEYS[0],)),
    ]
    for seq, selection in enumerate(asked, start=1):
        order = FlushOrder(seq=seq, before_ns=1, selection=selection)
        await call(pair.bus, subjects.forget(DECODE), Forget(order=order), Forgotten, timeout_s=5.0)
    one, none = frozenset({ROOT}), frozenset[bytes]()
    assert pair.decode_engine.forgotten == [none, one, one, none, one, None]
    assert pair.failures == []


async def test_an_engine_that_breaks_when_asked_what_is_hot_ends_its_worker(pair: Cluster) -> None:
    def broken() -> HotChanges:
        raise RuntimeError("no cache any more")

    pair.decode_engine.hot_changes = broken  # type: ignore[method-assign]
    await until(lambda: bool(pair.failures))
    assert pair.failures == ["the engine failed in hot_changes: RuntimeError: no cache any more"]


@pytest.mark.parametrize("length", [3 * CHUNK_TOKENS, 3 * CHUNK_TOKENS + 1, 3 * CHUNK_TOKENS + 5])
async def test_decode_takes_what_is_hot_where_nobody_provides_kv(pair: Cluster, length: int) -> None:
    tokens = prompt(length)
    for num_hot in (3 * CHUNK_TOKENS, 2 * CHUNK_TOKENS + 3, 0):
        pair.decode_engine.num_hot = num_hot
        pair.decode_spans.clear()
        _, half = pair.halves(tokens, prefill_worker=None)
        reader = await pair.listen(half.reply)
        await pair.send_decode(half)
        finished = await reader.finished()
        await pair.idle()
        num_taken = min(num_hot, length - 1)
        assert reader.tokens == reference(tokens, 6, SEED)
        assert finished.usage.cached_tokens == num_taken
        assert pair.decode_engine.decoded_from[-1] == num_taken
        assert pair.outcomes("decode") == ["hit_hbm"] * (num_taken // CHUNK_TOKENS)
        ended = pair.ended_of(Role.DECODE)[-1]
        assert (ended.num_reused_tokens, ended.num_computed_tokens) == (num_taken, length - num_taken)
    assert pair.decode_engine.num_loads == 0
    assert pair.failures == []


async def test_a_prompt_that_is_hot_at_decode_passes_prefill_by(pair: Cluster) -> None:
    """From the engine's word to the client's tokens: a real conductor between real workers."""
    conductor, _, _ = conductor_on(pair.bus, "conductor-2")
    await conductor.start()
    try:
        await until(lambda: len(conductor.members.cluster().workers) == 2)
        tokens = prompt(3 * CHUNK_TOKENS + 5)

        async def generate(name: str) -> Reader:
            reply = f"reply.{name}"
            reader = await pair.listen(reply)
            request = RequestSubmitted(
                request_id=RequestId(name),
                model=ModelName("exact"),
                tokens=tuple(tokens),
                tenant=TenantId("default"),
                sampling=Sampling(max_tokens=6, seed=SEED),
            )
            subject = subjects.request(ModelName("exact"))
            await pair.bus.stream_publish(subject, encode(request), headers={HEADER_REPLY: reply}, msg_id=name)
            await reader.finished()
            return reader

        cold = await generate("cold")
        assert (await cold.finished()).usage.cached_tokens == 0
        assert len(pair.prefill_engine.prefilled) == 1
        pair.decode_engine.num_hot = 3 * CHUNK_TOKENS
        pair.decode_engine.changes.append(HotChanges(frozenset(keys_of(tokens))))
        await until(lambda: conductor.hot.num_chunks() == {DECODE: 3})
        hot = await generate("hot")
        assert (await hot.finished()).usage.cached_tokens == 3 * CHUNK_TOKENS
        assert cold.tokens == hot.tokens == reference(tokens, 6, SEED)
        assert len(pair.prefill_engine.prefilled) == 1
        assert pair.decode_engine.decoded_from[-1] == 3 * CHUNK_TOKENS
        await pair.idle()
    finally:
        await conductor.stop()
        await conductor.telemetry.aclose()
