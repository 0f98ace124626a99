"""A kv-tier whose SSD fails, hangs, is full, or gives back other bytes: that costs time, and is told once."""

import asyncio
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from halfmoon.bus.memory import MemoryBroker
from halfmoon.kv_tier.ssd import store as ssd_store
from halfmoon.kv_tier.ssd.breaker import Breaker
from halfmoon.schemas.chunks import ChunkEvicted
from halfmoon.transport.health import Backoff
from support.pool_nodes import Node, follow, key_of
from support.ssd_nodes import (
    CORRUPT,
    FILE,
    HIT_LOCAL,
    HIT_REMOTE,
    MISS,
    NAMES,
    SSD,
    Disk,
    StartNode,
    below,
    fill,
    read,
    stats_of,
    write,
)
from support.wait import until, until_awaited


async def test_a_flipped_byte_on_the_disk_is_found_removed_and_computed_again(
    start: StartNode, broker: MemoryBroker
) -> None:
    async with start() as node, start("node-b", host="host-2") as other:
        _, events = await follow(broker)
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
