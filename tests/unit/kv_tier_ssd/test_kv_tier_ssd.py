"""A kv-tier with an SSD below its DRAM: chunks move down and up with exact bytes."""

import asyncio
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from halfmoon.bus.endpoint import call
from halfmoon.bus.memory import MemoryBroker
from halfmoon.kv_tier.quotas import TenantQuotas, TierQuota
from halfmoon.kv_tier.slot import Slot
from halfmoon.lifecycle.runtime import StartupError
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkEvicted, ChunkRegistered, Tier
from halfmoon.schemas.ids import RequestId, TenantId
from halfmoon.schemas.kv_tier import Done, Inventory, InventoryPage, Retell
from support.pool_nodes import CHUNK_BYTES, SLOT_BYTES, Node, follow, key_of, write_chunks
from support.ssd_nodes import (
    FILE,
    HIT_LOCAL,
    HIT_REMOTE,
    MISS,
    NAMES,
    NUM_SLOTS,
    SSD,
    Disk,
    StartNode,
    believed,
    below,
    fill,
    in_dram,
    num_free,
    read,
    stats_of,
    write,
)
from support.wait import until


async def test_more_than_dram_holds_is_kept_on_the_ssd_and_comes_back_exactly(node: Node, broker: MemoryBroker) -> None:
    _, events = await follow(broker)
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


async def test_what_is_promoted_takes_the_place_of_its_tenants_own_chunks(start: StartNode) -> None:
    acme = [f"acme-{number}" for number in range(4)]
    quotas = {"acme": TenantQuotas(dram=TierQuota(max_bytes=2 * SLOT_BYTES))}
    async with start(tenants=quotas) as node:
        for names in (acme[:2], NAMES[:6], acme[2:]):
            for name in names:
                tenant = TenantId("acme" if name in acme else "other")
                await until(lambda: num_free(node) > 1)
                lease = await write_chunks(node.client, name, tenant=tenant, request_id=RequestId(f"req-of-{name}"))
                await node.client.release(lease)
            await until(lambda: num_free(node) >= 4)
        for name, expected in ((acme[0], [acme[0], acme[3]]), (acme[1], acme[:2])):
            held = await node.client.acquire(RequestId("req-1st"), node.wanted(name))
            assert [chunk.outcome for chunk in held.chunks] == [SSD]
            assert [chunk.outcome for chunk in await read(node, name, by="req-2nd")] == [HIT_LOCAL]
            await node.client.release(held.lease_id)
            assert [name for name in acme if in_dram(node, name)] == expected
        assert stats_of(node).promotions == 2


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
    _, events = await follow(broker)
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
        _, events = await follow(broker)
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
