"""The arena: one file of shared memory per node, cut into slots of one size.

    | slot 0 | slot 1 | … | slot n-1 | tables (see `tables`), padded to a page |

The owner (a kv-tier) creates it and holds a lock on it for as long as it lives; engines on the host attach and write or
read the slots that they hold a lease on; other nodes on the host attach read-only. A slot's generation rises when the
slot is freed, so whoever compares it before and after reading knows whether the bytes were what was leased.

Plain `open` and `mmap`: `multiprocessing.shared_memory` unlinks segments under other processes when an attacher exits.
"""

import errno
import fcntl
import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Self
from urllib.parse import quote

import numpy as np

from halfmoon.memory import SharedMap
from halfmoon.pool.tables import ArenaTables, table_bytes
from halfmoon.schemas.ids import NodeId

PAGE_BYTES = mmap.PAGESIZE
DEFAULT_SHM_DIR = Path("/dev/shm")
_TOUCH_STEP_BYTES = 64 << 20


class ArenaError(Exception):
    """An arena that can't be created or attached. The message says why, and what to do."""


def aligned(num_bytes: int) -> int:
    """`num_bytes` rounded up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def arena_bytes(slot_bytes: int, num_slots: int) -> int:
    """Size of the whole file."""
    return slot_bytes * num_slots + aligned(table_bytes(num_slots))


def arena_path(directory: Path, node: NodeId, epoch: int) -> Path:
    return directory / f"{_stem(node)}{epoch}"


def remove_stale(directory: Path, node: NodeId) -> list[Path]:
    """Unlink what dead owners of this node left behind; return what was unlinked.

    Raises `ArenaError` where a live process owns one: a node may run once per host.
    """
    removed: list[Path] = []
    pattern = re.compile(re.escape(_stem(node)) + r"\d+")
    for path in sorted(directory.glob(f"{_glob_escape(_stem(node))}*")):
        if not pattern.fullmatch(path.name):
            continue
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ArenaError(f"{path} is in the way and can't be opened ({error.strerror}): remove it") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path)
        except BlockingIOError:
            raise ArenaError(
                f"node {node!r} already runs on this machine: a live process holds {path}. "
                "Stop it, or give this one another node name"
            ) from None
        finally:
            os.close(fd)
    return removed


class Arena:
    """A mapped arena. Views handed out stay valid after `close`: the memory goes when the last of them does."""

    def __init__(
        self,
        path: Path,
        fd: int,
        slot_bytes: int,
        num_slots: int,
        *,
        writable: bool,
        owner: bool,
        private: bool = False,
    ) -> None:
        self.path = path
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self.writable = writable
        self._owner = owner
        self._fd: int | None = fd
        self._map: SharedMap | None = SharedMap(
            fd, arena_bytes(slot_bytes, num_slots), path, writable=writable, private=private
        )
        self.tables = ArenaTables(memoryview(self._map)[slot_bytes * num_slots :], num_slots)
        """What the owner says of slots and leases."""

    @classmethod
    def create(
        cls, path: Path, slot_bytes: int, num_slots: int, *, progress: Callable[[float], None] | None = None
    ) -> Self:
        """Make the file (mode 0600), lock it, and touch every page, so that no reader pays for that later.

        Blocks for a second or so per GiB; `progress` is told the share done, 0..1. Raises `ArenaError`.
        """
        if slot_bytes <= 0 or slot_bytes % PAGE_BYTES:
            raise ArenaError(f"slot_bytes must be a multiple of the page size {PAGE_BYTES}, got {slot_bytes}")
        if num_slots <= 0:
            raise ArenaError(f"an arena needs at least one slot, got {num_slots}: raise arena_bytes")
        needed = arena_bytes(slot_bytes, num_slots)
        _check_room(path.parent, needed)
        fd = _create_locked(path)
        try:
            for start in range(0, needed, _TOUCH_STEP_BYTES):
                os.posix_fallocate(fd, start, min(_TOUCH_STEP_BYTES, needed - start))
            arena = cls(path, fd, slot_bytes, num_slots, writable=True, owner=True)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(fd)
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise ArenaError(_no_room(path.parent, needed, _free_bytes(path.parent))) from error
            raise ArenaError(f"can't create the arena {path}: {error.strerror}") from error
        arena._touch(progress)
        return arena

    @classmethod
    def attach(
        cls, path: Path, slot_bytes: int, num_slots: int, *, writable: bool = True, private: bool = False
    ) -> Self:
        """Map another process's arena. Raises `ArenaError`, also where its size isn't the one described.

        `private`, together with `writable=False`: views count as writable (there are libraries that take no others
        without a copy), and what would be written into them stays in this process.
        """
        try:
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW)
        except OSError as error:
            raise ArenaError(f"can't open the arena {path}: {error.strerror}") from error
        try:
            size, expected = os.fstat(fd).st_size, arena_bytes(slot_bytes, num_slots)
            if size != expected:
                raise ArenaError(f"the arena {path} has {size} bytes where {expected} were described: another epoch?")
            return cls(path, fd, slot_bytes, num_slots, writable=writable, owner=False, private=private)
        except OSError as error:
            os.close(fd)
            raise ArenaError(f"can't map the arena {path}: {error.strerror}") from error
        except BaseException:
            os.close(fd)
            raise

    def slot(self, slot: int, num_bytes: int | None = None, offset: int = 0) -> memoryview:
        """Bytes `[offset, offset + num_bytes)` of a slot, up to its end by default. Raises ValueError out of range."""
        size = self.slot_bytes - offset if num_bytes is None else num_bytes
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot} of an arena of {self.num_slots}")
        if offset < 0 or size < 0 or offset + size > self.slot_bytes:
            raise ValueError(f"bytes [{offset}, {offset + size}) of a slot of {self.slot_bytes}")
        start = slot * self.slot_bytes + offset
        return memoryview(self._mapped())[start : start + size]

    def generation(self, slot: int) -> int:
        """The slot's generation now, as its owner wrote it."""
        return self.tables.generation(slot)

    def set_generation(self, slot: int, generation: int) -> None:
        """For the owner."""
        self.tables.set_generation(slot, generation)

    def whole(self) -> memoryview:
        """All of it, tables and all: for a device that is to know the memory. Keeps it mapped."""
        return memoryview(self._mapped())

    def touch(self) -> None:
        """Map every page into this process, which its first accesses would pay for otherwise: one look at each.

        Blocks for about 0.1 s per GiB, without the interpreter lock.
        """
        np.frombuffer(self._mapped(), dtype=np.uint8)[::PAGE_BYTES].max()

    def close(self) -> None:
        """Unmap, and let go of the owner's lock. Idempotent."""
        if self._map is not None:
            mapped, self._map = self._map, None
            self.tables.release()
            try:
                mapped.close()
            except BufferError:
                del mapped  # Views are still out; the mapping goes with the last of them.
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def unlink(self) -> None:
        """Remove the file; mappings of it stay valid. Idempotent."""
        self.path.unlink(missing_ok=True)

    def _mapped(self) -> SharedMap:
        if self._map is None:
            raise ValueError(f"the arena {self.path} is closed")
        return self._map

    def _touch(self, progress: Callable[[float], None] | None) -> None:
        pages = np.frombuffer(self._mapped(), dtype=np.uint8)[::PAGE_BYTES]
        step = _TOUCH_STEP_BYTES // PAGE_BYTES
        for start in range(0, len(pages), step):
            pages[start : start + step] = 0  # Without the interpreter lock: the caller's event loop goes on.
            if progress is not None:
                progress(min(start + step, len(pages)) / len(pages))


def _stem(node: NodeId) -> str:
    return f"halfmoon-{quote(node, safe='')}-"


def _glob_escape(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def _create_locked(path: Path) -> int:
    """A new, locked file. A cleaner may unlink it between creation and lock; then it is made again."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ArenaError(f"can't create the arena {path}: {error.strerror}") from error
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def _check_room(directory: Path, needed: int) -> None:
    if not directory.is_dir():
        raise ArenaError(f"{directory} is no directory: set shm_dir to one on a memory file system")
    free = _free_bytes(directory)
    if needed > free:
        raise ArenaError(_no_room(directory, needed, free))


def _free_bytes(directory: Path) -> int:
    stats = os.statvfs(directory)
    return stats.f_bavail * stats.f_frsize


def _no_room(directory: Path, needed: int, free: int) -> str:
    return (
        f"the arena needs {needed / 2**20:,.0f} MiB of {directory}, {free / 2**20:,.0f} MiB are free: "
        "lower arena_bytes, enlarge the file system (docker: --shm-size), or set shm_dir to another directory"
    )
