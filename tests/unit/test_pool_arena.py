"""The arena: what is written in one mapping is read in another, and nothing is left of a dead owner."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from halfmoon.pool.arena import PAGE_BYTES, Arena, ArenaError, aligned, arena_bytes, arena_path, remove_stale
from halfmoon.pool.tables import table_bytes
from halfmoon.schemas.ids import NodeId

SLOT_BYTES = 2 * PAGE_BYTES
NODE = NodeId("rack-1/node*")

OWNER = """
import sys
from pathlib import Path
from halfmoon.pool.arena import Arena
arena = Arena.create(Path(sys.argv[1]), 4096, 4)
print("ready", flush=True)
sys.stdin.read()
"""


def test_bytes_written_through_one_mapping_are_read_through_another(tmp_path: Path) -> None:
    path = arena_path(tmp_path, NODE, 17)
    owner = Arena.create(path, SLOT_BYTES, 3)
    writer = Arena.attach(path, SLOT_BYTES, 3)
    reader = Arena.attach(path, SLOT_BYTES, 3, writable=False)
    writer.slot(1, 5)[:] = b"hello"
    assert bytes(reader.slot(1, 3, offset=2)) == b"llo"
    assert bytes(reader.slot(0)) == bytes(SLOT_BYTES)
    assert bytes(reader.slot(2)) == bytes(SLOT_BYTES)
    assert reader.slot(1).readonly
    reader.touch()
    owner.set_generation(2, 41)
    assert [reader.generation(slot) for slot in range(3)] == [0, 0, 41]
    assert path.stat().st_mode & 0o777 == 0o600
    for arena in (owner, writer, reader):
        arena.close()
        arena.close()
    owner.unlink()
    owner.unlink()
    assert list(tmp_path.iterdir()) == []


def test_every_page_is_there_after_create_and_progress_ends_at_one(tmp_path: Path) -> None:
    seen: list[float] = []
    arena = Arena.create(tmp_path / "a", SLOT_BYTES, 5, progress=seen.append)
    assert seen[-1] == 1.0
    assert seen == sorted(seen)
    assert arena.path.stat().st_size == arena_bytes(SLOT_BYTES, 5) == 5 * SLOT_BYTES + aligned(table_bytes(5))
    assert arena.path.stat().st_blocks * 512 >= arena_bytes(SLOT_BYTES, 5)
    arena.close()


@pytest.mark.parametrize(("slot", "num_bytes", "offset"), [(-1, 1, 0), (3, 1, 0), (0, SLOT_BYTES + 1, 0), (0, 1, -1)])
def test_a_range_outside_a_slot_is_refused(tmp_path: Path, slot: int, num_bytes: int, offset: int) -> None:
    arena = Arena.create(tmp_path / "a", SLOT_BYTES, 3)
    with pytest.raises(ValueError, match=r"slot|bytes"):
        arena.slot(slot, num_bytes, offset)
    arena.close()


def test_views_outlive_close(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "a", SLOT_BYTES, 1)
    view = arena.slot(0)
    view[:3] = b"abc"
    arena.close()
    assert bytes(view[:3]) == b"abc"
    with pytest.raises(ValueError, match="closed"):
        arena.slot(0)


def test_too_little_room_says_how_much_is_needed_and_what_to_do(tmp_path: Path) -> None:
    stats = os.statvfs(tmp_path)
    too_many = stats.f_bavail * stats.f_frsize // SLOT_BYTES + 1000
    with pytest.raises(ArenaError, match=r"needs [\d,]+ MiB .* [\d,]+ MiB are free: lower arena_bytes"):
        Arena.create(tmp_path / "a", SLOT_BYTES, too_many)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("slot_bytes", "num_slots"), [(100, 1), (0, 1), (PAGE_BYTES, 0)])
def test_impossible_shapes_are_refused(tmp_path: Path, slot_bytes: int, num_slots: int) -> None:
    with pytest.raises(ArenaError):
        Arena.create(tmp_path / "a", slot_bytes, num_slots)


def test_attaching_to_what_is_not_the_arena_described_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match="No such file"):
        Arena.attach(tmp_path / "a", SLOT_BYTES, 3)
    arena = Arena.create(tmp_path / "a", SLOT_BYTES, 3)
    with pytest.raises(ArenaError, match="another epoch"):
        Arena.attach(tmp_path / "a", SLOT_BYTES, 4)
    arena.close()


def test_what_a_killed_owner_left_is_removed_and_a_live_one_is_respected(tmp_path: Path) -> None:
    path = arena_path(tmp_path, NODE, 1)
    other = arena_path(tmp_path, NodeId("rack-1/node*-2"), 1)
    other.write_bytes(b"somebody else's")
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        with pytest.raises(ArenaError, match="already runs on this machine"):
            remove_stale(tmp_path, NODE)
        assert path.exists()
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
    assert path.exists()
    assert remove_stale(tmp_path, NODE) == [path]
    assert list(tmp_path.iterdir()) == [other]


def test_alignment() -> None:
    assert [aligned(size) for size in (0, 1, PAGE_BYTES, PAGE_BYTES + 1)] == [0, PAGE_BYTES, PAGE_BYTES, 2 * PAGE_BYTES]
