"""A kv-tier with an SSD below its DRAM: chunks move down and up with exact bytes, whatever the disk does meanwhile."""

import asyncio
import errno
import os
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from halfmoon.bus.endpoint import Envelope, call, read_stream, serve
from halfmoon.bus.errors import StreamGap
from halfmoon.bus.memory import MemoryBroker, MemoryBus
from halfmoon.kv_tier.slots import Slot
from halfmoon.kv_tier.ssd import open as ssd_open
from halfmoon.kv_tier.ssd import store as ssd_store
from halfmoon.kv_tier.ssd.breaker import Breaker
from halfmoon.kv_tier.ssd.directory import SsdDirectory
from halfmoon.kv_tier.ssd.file import FileBody, file_bytes
from halfmoon.lifecycle.runtime import StartupError
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkEvent, ChunkEvicted, ChunkMeta, ChunkOutcome, ChunkRegistered, Tier
from halfmoon.schemas.ids import ChunkKey, RequestId
from halfmoon.schemas.kv_tier import AcquiredChunk, Done, Inventory, InventoryPage, Retell, SsdStats
from halfmoon.schemas.registry import Orders, StandingOrders
from halfmoon.transport.health import Backoff
from support.pool_nodes import CHUNK_BYTES, Node, content_of, key_of, running_node, write_chunks
from support.wait import until, until_awaited

SSD, HIT_LOCAL, HIT_REMOTE = ChunkOutcome.SSD, ChunkOutcome.HIT_LOCAL, ChunkOutcome.HIT_REMOTE
MISS, CORRUPT = ChunkOutcome.MISS, ChunkOutcome.CORRUPT
FILE = file_bytes(CHUNK_BYTES)
NUM_SLOTS = 8
NAMES = [f"chunk-{number}" for number in range(20)]

StartNode = Callable[..., AbstractAsyncContextManager[Node]]


class Disk(SsdDirectory):
    """A real directory whose disk can be told to fail, or to keep its writers or readers waiting."""

    write_error: int | None = None
    read_error: int | None = None
    may_write = threading.Event()
    may_read = threading.Event()
    num_waiting = 0

    def write(self, body: FileBody, padded: memoryview) -> None:
        if Disk.write_error is not None:
            raise OSError(Disk.write_error, os.strerror(Disk.write_error))
        self._wait(Disk.may_write)
        super().write(body, padded)

    def read(self, key: ChunkKey, padded: memoryview) -> FileBody:
        if Disk.read_error is not None:
            raise OSError(Disk.read_error, os.strerror(Disk.read_error))
        self._wait(Disk.may_read)
        return super().read(key, padded)

    def _wait(self, gate: threading.Event) -> None:
        if not gate.is_set():
            Disk.num_waiting += 1
            gate.wait(20)
            Disk.num_waiting -= 1


@pytest.fixture(autouse=True)
def _disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Disk.write_error = Disk.read_error = None
    Disk.num_waiting = 0
    Disk.may_write.set()
    Disk.may_read.set()
    monkeypatch.setattr(ssd_open, "SsdDirectory", Disk)
    yield
    Disk.may_write.set()
    Disk.may_read.set()


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def start(broker: MemoryBroker, tmp_path: Path) -> AsyncIterator[StartNode]:
    """Starts a node whose SSD is a folder of its own, and takes every chunk."""

    @asynccontextmanager
    async def start_one(name: str = "node-a", **settings: object) -> AsyncIterator[Node]:
        ssd: Mapping[str, object] = {
            "ssd_dir": tmp_path / "ssd" / name,
            "ssd_bytes": 100 * FILE,
            "ssd_admission": "all",
            "eviction_policy": "lru",
            "high_watermark": 0.51,
            "low_watermark": 0.5,
        }
        host = settings.pop("host", "host-1")
        async with running_node(
            broker, tmp_path, name, host=str(host), num_slots=NUM_SLOTS, settings={**ssd, **settings}
        ) as running:
            await until(lambda: running.service.store.lower is not None)
            yield running
            running.service.store.check_integrity()

    async def orders(request: Orders, envelope: Envelope) -> StandingOrders:
        return StandingOrders(seq=0, flushes=(), pins=())

    bus = MemoryBus(broker)
    await serve(bus, subjects.registry("orders"), Orders, orders)
    yield start_one
    await bus.close()


@pytest.fixture
async def node(start: StartNode) -> AsyncIterator[Node]:
    async with start() as running:
        yield running


def stats_of(node: Node) -> SsdStats:
    stats = node.service.store.stats(0).ssd
    assert stats is not None
    return stats


def in_dram(node: Node, name: str) -> bool:
    slot = node.service.store.ledger.slots.find(key_of(name))
    return slot is not None and slot.registered


def num_free(node: Node) -> int:
    return node.service.store.ledger.slots.counts().free


async def write(node: Node, *names: str) -> None:
    """Each for a request of its own."""
    for name in names:
        lease = await write_chunks(node.client, name, request_id=RequestId(f"req-of-{name}"))
        await node.client.release(lease)


async def fill(node: Node, *names: str) -> None:
    """Write chunks one by one, as fast as the pool can demote: so none has to be evicted."""
    for name in names:
        await until(lambda: num_free(node) > 1, what="a free slot")
        await write(node, name)
    await until(lambda: num_free(node) >= 4 and node.service.store.ledger.slots.counts().leased == 0)


def below(node: Node) -> list[str]:
    """Those on the SSD only."""
    return [name for name in NAMES if not in_dram(node, name)]


async def read(node: Node, *names: str, by: str = "req-reader", sources: tuple[Node, ...] = ()) -> list[AcquiredChunk]:
    """Acquire and compare every byte; the lease is given back."""
    wanted = node.wanted(*names, sources=[each.source for each in sources])
    acquired = await node.client.acquire(RequestId(by), wanted)
    for name, chunk in zip(names, acquired.chunks, strict=True):
        assert (chunk.slot is None) == (chunk.outcome in (MISS, CORRUPT)), chunk
        if chunk.slot is not None:
            assert bytes(node.client.payload(chunk.slot)) == content_of(name)
            assert chunk.meta is not None
            assert chunk.slot.checksum == chunk.meta.checksum
    await node.client.release(acquired.lease_id)
    return list(acquired.chunks)


async def follow(broker: MemoryBroker) -> list[ChunkEvent]:
    events: list[ChunkEvent] = []

    async def seen(seq: int, event: ChunkEvent) -> None:
        events.append(event)

    async def gap(gap: StreamGap) -> None:
        raise AssertionError(gap)

    await read_stream(MemoryBus(broker), subjects.CHUNKS_STREAM, ChunkEvent, seen, start_seq=1, on_gap=gap)
    return events


def believed(events: list[ChunkEvent]) -> dict[ChunkKey, ChunkMeta]:
    """What a follower of the stream knows of one node."""
    known: dict[ChunkKey, ChunkMeta] = {}
    for event in events:
        match event:
            case ChunkRegistered():
                known.update({chunk.key: chunk for chunk in event.chunks})
            case ChunkEvicted():
                for key in event.keys:
                    known.pop(key, None)
            case _:
                known.clear()
    return known


async def test_more_than_dram_holds_is_kept_on_the_ssd_and_comes_back_exactly(node: Node, broker: MemoryBroker) -> None:
    events = await follow(broker)
    await fill(node, *NAMES)
    stats = stats_of(node)
    on_ssd = below(node)
    assert len(on_ssd) >= len(NAMES) - NUM_SLOTS
    assert (stats.num_chunks, stats.num_bytes) == (stats.writes, stats.writes * FILE)
    assert stats.demotions == len(on_ssd)
    assert node.service.store.counters.evictions == 0
    for name in on_ssd:
        (chunk,) = await read(node, name)
        assert (chunk.outcome, chunk.source, chunk.num_bytes_moved) == (SSD, "node-a", CHUNK_BYTES)
        assert 0 < chunk.started_ns <= chunk.transfer_started_ns <= chunk.finished_ns
    assert stats_of(node).hits == stats_of(node).reads == len(on_ssd)
    await until(lambda: len(believed(events)) == len(NAMES))
    tiers = {key_of(name): Tier.DRAM if in_dram(node, name) else Tier.SSD for name in NAMES}
    await until(lambda: {key: meta.tier for key, meta in believed(events).items()} == tiers)
    page = await call(node.bus, "halfmoon.kvtier.node-a.inventory", Inventory(), InventoryPage, timeout_s=5.0)
    assert page.keys == tuple(sorted(tiers))
    assert page.on_ssd == tuple(key for key in page.keys if tiers[key] is Tier.SSD)
    assert not [event for event in events if isinstance(event, ChunkEvicted)], "no chunk was nowhere at any time"
    metrics = generate_latest(node.metrics.registry).decode()
    assert f"halfmoon_kvtier_ssd_hits_total {len(on_ssd)}.0" in metrics
    assert f"halfmoon_kvtier_ssd_chunks {stats_of(node).num_chunks}.0" in metrics


async def test_a_second_use_brings_a_chunk_back_into_dram(node: Node) -> None:
    await fill(node, *NAMES)
    name = below(node)[0]
    for _ in ("prefill", "decode"):
        assert [chunk.outcome for chunk in await read(node, name, by="req-1st")] == [SSD]
        assert not in_dram(node, name)
    assert [chunk.outcome for chunk in await read(node, name, by="req-2nd")] == [SSD]
    assert in_dram(node, name)
    assert [chunk.outcome for chunk in await read(node, name, by="req-3rd")] == [HIT_LOCAL]
    assert (stats_of(node).promotions, stats_of(node).reads) == (1, 3)
    writes = stats_of(node).writes
    await fill(node, *(f"more-{number}" for number in range(8)))
    await read(node, *(f"more-{number}" for number in range(8)), by="req-4th")
    await fill(node, *(f"again-{number}" for number in range(8)))
    assert not in_dram(node, name)
    assert stats_of(node).writes <= writes + 8 + NUM_SLOTS, "its file was still there: it wasn't written again"
    told = {"kvtier.demote", "kvtier.promote"}
    await until(lambda: told <= {span.name for span in node.spans.get_finished_spans()})


async def test_two_readers_at_once_share_one_read_and_the_second_one_promotes(node: Node) -> None:
    await fill(node, *NAMES)
    name = below(node)[0]
    Disk.may_read.clear()
    first = asyncio.create_task(read(node, name, by="req-1st"))
    second = asyncio.create_task(read(node, name, by="req-2nd"))
    await until(lambda: Disk.num_waiting == 1)
    await until(lambda: len(node.service.store.ledger.leases) == 3)
    Disk.may_read.set()
    assert [chunk.outcome for chunks in await asyncio.gather(first, second) for chunk in chunks] == [SSD, SSD]
    assert stats_of(node).reads == 1
    assert in_dram(node, name)


async def test_what_a_second_reader_finds_as_a_working_copy_is_kept(node: Node) -> None:
    await fill(node, *NAMES)
    name = below(node)[0]
    held = await node.client.acquire(RequestId("req-1st"), node.wanted(name))
    assert not in_dram(node, name)
    assert [chunk.outcome for chunk in await read(node, name, by="req-2nd")] == [HIT_LOCAL]
    assert in_dram(node, name)
    await node.client.release(held.lease_id)
    assert [chunk.outcome for chunk in await read(node, name, by="req-3rd")] == [HIT_LOCAL]
    assert stats_of(node).promotions == 1


async def test_uses_too_far_apart_do_not_promote(start: StartNode) -> None:
    async with start(promote_within=3) as node:
        await fill(node, *NAMES)
        name = below(node)[0]
        await read(node, name, by="req-1st")
        await fill(node, "w", "x", "y", "z")
        await read(node, name, by="req-2nd")
        assert not in_dram(node, name)
        await read(node, name, by="req-3rd")
        assert in_dram(node, name)


def being_written(node: Node) -> Slot:
    """The slot of a pool whose disk keeps a writer waiting."""
    slots = [node.service.store.ledger.slots[number] for number in range(NUM_SLOTS)]
    (slot,) = [slot for slot in slots if slot.num_leases]
    return slot


async def test_a_chunk_that_is_read_while_it_is_demoted_stays(node: Node) -> None:
    Disk.may_write.clear()
    await write(node, *NAMES[:5])
    await until(lambda: Disk.num_waiting == 1)
    assert being_written(node).key == key_of(NAMES[0])
    assert [chunk.outcome for chunk in await read(node, NAMES[0])] == [HIT_LOCAL]
    Disk.may_write.set()
    await until(lambda: num_free(node) == 4)
    assert [name for name in NAMES[:5] if not in_dram(node, name)] == [NAMES[1]], "the next in line went instead"
    assert (stats_of(node).writes, stats_of(node).demotions) == (2, 1)


async def test_a_request_in_a_hurry_evicts_and_gets_no_slot_that_is_being_written(node: Node) -> None:
    Disk.may_write.clear()
    await write(node, *NAMES[:5])
    await until(lambda: Disk.num_waiting == 1)
    slot = being_written(node)
    before = slot.generation
    await node.client.release(await node.write(*(f"hurry-{number}" for number in range(7))))
    assert (slot.key, slot.generation) == (key_of(NAMES[0]), before)
    assert node.service.store.counters.evictions == 4
    Disk.may_write.set()
    await until(lambda: num_free(node) == 4)
    assert [chunk.outcome for chunk in await read(node, NAMES[0])] == [SSD]


async def test_chunks_used_once_are_not_written(start: StartNode) -> None:
    async with start(ssd_admission="auto") as node:
        await write(node, *NAMES)
        await until(lambda: num_free(node) >= 4)
        stats = stats_of(node)
        assert (stats.writes, stats.num_chunks, stats.demotions) == (0, 0, 0)
        assert stats.refused > 0
        used = next(name for name in NAMES if in_dram(node, name))
        await read(node, used)
        await fill(node, *(f"more-{number}" for number in range(12)))
        assert not in_dram(node, used)
        assert [chunk.outcome for chunk in await read(node, used)] == [SSD]
        assert stats_of(node).writes == 1


@pytest.mark.parametrize("host", ["host-1", "host-2"])
async def test_another_node_reads_from_this_ones_ssd_and_nothing_is_kept_here(start: StartNode, host: str) -> None:
    async with start() as first, start("node-b", host=host, read_in_place=False) as second:
        await fill(first, *NAMES)
        name = below(first)[0]
        for round_ in range(3):
            (chunk,) = await read(second, name, by=f"req-{round_}", sources=(first,))
            assert chunk.outcome is (HIT_LOCAL if round_ else HIT_REMOTE)
        assert not in_dram(first, name)
        assert stats_of(first).promotions == 0
        await until(lambda: first.service.store.ledger.slots.counts().leased == 0, what="the staging slot freed")
        free = num_free(first)
        found = first.service.store.ledger.slots.find(key_of(name))
        assert found is None
        assert free >= 2


async def test_a_flipped_byte_on_the_disk_is_found_removed_and_computed_again(
    start: StartNode, broker: MemoryBroker
) -> None:
    async with start() as node, start("node-b", host="host-2") as other:
        events = await follow(broker)
        await fill(node, *NAMES)
        flipped, elsewhere, gone = below(node)[:3]
        await other.client.release(await other.write(elsewhere))
        lower = node.service.store.lower
        assert lower is not None
        for name in (flipped, elsewhere):
            path = lower.ssd.directory.path_of(key_of(name))
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        (chunk,) = await read(node, flipped)
        assert (chunk.outcome, chunk.detail) == (CORRUPT, "the payload's checksum is wrong")
        (again,) = await read(node, flipped)
        assert again.outcome is MISS
        assert stats_of(node).removed == {"torn": 1}
        await lower.ssd.settled()
        assert not lower.ssd.directory.path_of(key_of(flipped)).exists()
        await until(lambda: any(isinstance(event, ChunkEvicted) and key_of(flipped) in event.keys for event in events))
        (pulled,) = await read(node, elsewhere, sources=(other,))
        assert pulled.outcome is HIT_REMOTE, "another node has it"
        lower.ssd.directory.path_of(key_of(gone)).unlink()
        (taken,) = await read(node, gone)
        assert (taken.outcome, taken.detail) == (MISS, "its file is gone")
        assert stats_of(node).removed == {"torn": 2, "missing": 1}
        assert stats_of(node).failure == ""


def hasty(node: Node) -> None:
    """Tries its disk again after a tenth of a second."""
    lower = node.service.store.lower
    assert lower is not None
    lower.ssd.write_breaker = Breaker(backoff=Backoff(0.1, 0.1))
    lower.ssd.read_breaker = Breaker(tolerance=2, backoff=Backoff(0.1, 0.1))


async def test_a_disk_that_fails_writes_costs_no_request_and_is_tried_again(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    hasty(node)
    Disk.write_error = errno.EIO
    await write(node, *NAMES)
    await until(lambda: stats_of(node).failure == "Input/output error")
    assert stats_of(node).errors >= 1
    assert node.service.heartbeat().pool.ssd.failure  # type: ignore[union-attr]
    await until(lambda: stats_of(node).errors >= 3, what="it is tried again")
    assert capsys.readouterr().out.count("the SSD can't be written") == 1
    assert "halfmoon_kvtier_ssd_failing 1.0" in generate_latest(node.metrics.registry).decode()
    Disk.write_error = None
    await until(lambda: stats_of(node).demotions > 0)
    assert stats_of(node).failure == ""
    assert "the SSD can be written again" in capsys.readouterr().out


async def test_a_disk_that_fails_reads_is_left_alone_and_its_chunks_are_misses(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    hasty(node)
    await fill(node, *NAMES)
    on_ssd = below(node)
    Disk.read_error = errno.EIO
    outcomes = [(await read(node, name))[0] for name in on_ssd[:4]]
    assert [chunk.outcome for chunk in outcomes] == [MISS] * 4
    assert "the SSD is left alone for a while: Input/output error" in outcomes[3].detail
    assert stats_of(node).errors == 3
    assert capsys.readouterr().out.count("the SSD can't be read") == 1
    Disk.read_error = None

    async def works() -> bool:
        return (await read(node, on_ssd[3]))[0].outcome is SSD

    await until_awaited(works)
    assert stats_of(node).failure == ""


async def test_a_disk_that_hangs_keeps_nobody_waiting_for_long(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await fill(node, *NAMES)
    on_ssd = below(node)
    monkeypatch.setattr(ssd_store, "_SILENCE_S", 0.1)
    hasty(node)
    assert node.service.store.lower is not None
    node.service.store.lower.ssd.read_breaker = Breaker(backoff=Backoff(60, 60))
    Disk.may_read.clear()
    (chunk,) = await asyncio.wait_for(read(node, on_ssd[0]), 5)
    assert chunk.outcome is MISS
    assert "a read takes longer than 0.1 s" in chunk.detail
    (chunk,) = await asyncio.wait_for(read(node, on_ssd[1]), 5)
    assert chunk.outcome is MISS
    staged = node.service.store.ledger.slots.counts().staged
    assert staged == 1, "a thread still writes into it: nobody else may have that slot"
    Disk.may_read.set()
    await until(lambda: node.service.store.ledger.slots.counts().staged == 0)


async def test_a_restart_finds_what_was_there_and_announces_it_under_the_new_epoch(
    start: StartNode, broker: MemoryBroker, tmp_path: Path
) -> None:
    async with start() as node:
        await fill(node, *NAMES)
        lower = node.service.store.lower
        assert lower is not None
        kept = {meta.key for meta in lower.ssd.metas()}
        gone, still = below(node)[:2]
        torn = lower.ssd.directory.path_of(key_of(gone))
    torn.write_bytes(torn.read_bytes()[:5000])
    events = await follow(broker)
    async with start() as node:
        expected = kept - {key_of(gone)}
        await until(lambda: set(believed(events)) == expected)
        assert {meta.tier for meta in believed(events).values()} == {Tier.SSD}
        assert {event.epoch for event in events[-2:]} == {node.client.info.epoch}
        assert stats_of(node).removed == {"torn": 1}
        assert not torn.exists()
        assert node.service.store.inventory(None, 100) == dict.fromkeys(expected, Tier.SSD)
        for name in NAMES:
            outcome = SSD if key_of(name) in expected else MISS
            assert [chunk.outcome for chunk in await read(node, name)] == [outcome]
        before = len(events)
        subject = f"{subjects.kv_tier(node.service.node)}.retell"
        keys = (key_of(gone), key_of(still))
        await call(node.client._bus, subject, Retell(keys=keys), Done, timeout_s=5)
        await until(lambda: len(events) == before + 2)
        assert {type(event) for event in events[-2:]} == {ChunkRegistered, ChunkEvicted}


async def test_the_ssd_evicts_when_its_bytes_are_used_up(start: StartNode, broker: MemoryBroker) -> None:
    async with start(ssd_bytes=5 * FILE + 100) as node:
        events = await follow(broker)
        await fill(node, *NAMES)
        lower = node.service.store.lower
        assert lower is not None
        await lower.ssd.settled()
        files = list(lower.ssd.directory.root.glob("chunks/*/*"))
        assert len(files) == stats_of(node).num_chunks == 5
        assert stats_of(node).evictions == stats_of(node).writes - 5
        await until(lambda: set(believed(events)) == set(node.service.store.inventory(None, 100)))
    async with start(ssd_bytes=FILE * 2) as node:
        assert stats_of(node).num_chunks == 2, "less is allowed now"


async def test_settings_that_can_not_work_are_clear_errors(start: StartNode, tmp_path: Path) -> None:
    async def fails(error: type[Exception], match: str, **settings: object) -> None:
        with pytest.raises(error, match=match):
            async with start("node-b", **settings):
                pass

    await fails(StartupError, "less than one chunk's file of 20480", ssd_bytes=10_000)
    async with start("node-a"):
        await fails(StartupError, "belongs to a live kv-tier", ssd_dir=tmp_path / "ssd" / "node-a")
    await fails(ValueError, "set both, or neither", low_watermark=None)
    await fails(ValueError, "lower the former", low_watermark=0.8)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB: room for about 16 chunks."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


async def test_a_full_file_system_is_dram_only_until_there_is_room(start: StartNode, small_disk: Path) -> None:
    filler = small_disk / "filler"
    async with start(ssd_dir=small_disk / "ssd", ssd_bytes=100 * FILE) as node:
        hasty(node)
        with filler.open("wb") as file:
            file.write(bytes(os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize))
        await write(node, *NAMES)
        await until(lambda: stats_of(node).failure == "No space left on device")
        assert stats_of(node).writes == 0
        assert [chunk.outcome for chunk in await read(node, NAMES[-1])] == [HIT_LOCAL]
        filler.unlink()
        await until(lambda: stats_of(node).demotions > 0)
        assert stats_of(node).failure == ""
        # More than the file system holds: the tier makes do with what there is.
        await fill(node, *(f"more-{number}" for number in range(30)))
        stats = stats_of(node)
        assert (stats.failure, stats.evictions > 0) == ("", True)
        assert stats.num_bytes < 256 * 1024
        on_ssd = below(node)
        assert {(await read(node, name))[0].outcome for name in on_ssd} <= {SSD, MISS}
