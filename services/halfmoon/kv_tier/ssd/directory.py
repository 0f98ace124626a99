"""The directory of the SSD tier: one file per chunk, one owner at a time. Everything here blocks.

    <root>/lock                  held by the kv-tier that owns the directory, as long as it lives
    <root>/chunks/3f/3f09…       a chunk's file, named by its key in hex
    <root>/chunks/3f/3f09….new   one that is being written

Whatever lies below `chunks` belongs to the tier; what is of no use there is removed. Nothing beside it is touched.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from halfmoon.chunks.keys import KEY_BYTES
from halfmoon.kv_tier.ssd.file import (
    HEADER_BYTES,
    BadFile,
    BadReason,
    FileBody,
    read_body,
    read_file,
    write_file,
)
from halfmoon.lifecycle.runtime import StartupError
from halfmoon.schemas.ids import ChunkKey

_UNFINISHED = ".new"
_SPARE_BYTES = 64 << 20
_SPARE_SHARE = 16
"""Of a small file system, one part in so many is left free; of a large one, `_SPARE_BYTES`."""


@dataclass(slots=True)
class Scan:
    """What a directory held."""

    found: list[FileBody] = field(default_factory=list)
    removed: Counter[BadReason] = field(default_factory=Counter)
    num_unfinished: int = 0
    """Files that a writer left when it was killed."""
    num_unreadable: int = 0


class SsdDirectory:
    """Reads and writes chunks' files. Its methods may run in several threads at once, for different chunks."""

    def __init__(self, root: Path, slot_bytes: int) -> None:
        """Take the directory, making it where it isn't there. Raises `StartupError`."""
        self.root = root
        self._chunks = root / "chunks"
        self._slot_bytes = slot_bytes
        try:
            self._chunks.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = _locked(root / "lock")
        except OSError as error:
            raise StartupError(
                f"the SSD tier can't use {root}: {error.strerror or error}; set ssd_dir to a directory of its own"
            ) from None
        try:
            self.is_direct = _takes_direct(self._chunks)
        except OSError as error:
            os.close(self._lock_fd)
            raise StartupError(
                f"the SSD tier can't write to {root}: {error.strerror or error}; set ssd_dir to another directory, "
                "or no ssd_dir"
            ) from None

    def close(self) -> None:
        """Let another have the directory. Idempotent."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    def path_of(self, key: ChunkKey) -> Path:
        name = key.hex()
        return self._chunks / name[:2] / name

    def free_bytes(self) -> int:
        """What may still be written here, with some left for others. Raises OSError."""
        stats = os.statvfs(self._chunks)
        spare = min(_SPARE_BYTES, stats.f_blocks // _SPARE_SHARE * stats.f_frsize)
        return max(0, stats.f_bavail * stats.f_frsize - spare)

    def write(self, body: FileBody, padded: memoryview) -> None:
        """Write a chunk, in place of an older file of it. Raises OSError, and leaves nothing half written then."""
        path = self.path_of(body.meta.key)
        unfinished = path.with_name(f"{path.name}-{threading.get_ident()}{_UNFINISHED}")
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            write_file(unfinished, body, padded, direct=self.is_direct)
            unfinished.rename(path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise

    def read(self, key: ChunkKey, padded: memoryview) -> FileBody:
        """Read a chunk's payload into `padded`. Raises as `ssd_file.read_file`."""
        return read_file(self.path_of(key), key, padded, direct=self.is_direct)

    def remove(self, key: ChunkKey) -> None:
        """Remove a chunk's file, where there is one. Raises OSError."""
        self.path_of(key).unlink(missing_ok=True)

    def scan(self, max_age_s: float | None, log: structlog.stdlib.BoundLogger) -> Scan:
        """Look at every file's header; what can't be served is removed, and counted. Raises OSError."""
        result = Scan()
        for folder, name in self._files():
            path = f"{folder}/{name}"
            if name.endswith(_UNFINISHED):
                result.num_unfinished += 1
                _discard(path)
                continue
            try:
                result.found.append(self._checked(path, name, max_age_s))
            except FileNotFoundError:
                continue
            except BadFile as error:
                log.warning("a file of the SSD tier is removed", file=name, reason=error.reason, detail=str(error))
                result.removed[error.reason] += 1
                _discard(path)
            except OSError as error:
                log.warning("a file of the SSD tier can't be read", file=name, error=error.strerror)
                result.num_unreadable += 1
        return result

    def _files(self) -> Iterator[tuple[str, str]]:
        """Folder and name of whatever lies where chunks' files do."""
        with os.scandir(self._chunks) as entries:
            folders = sorted(entries, key=lambda entry: entry.name)
        for folder in folders:
            if folder.is_dir(follow_symlinks=False):
                yield from ((folder.path, name) for name in os.listdir(folder.path))
            else:
                yield str(self._chunks), folder.name

    def _checked(self, path: str, name: str, max_age_s: float | None) -> FileBody:
        key = _key_of(name)
        if key is None or not path.endswith(f"/chunks/{name[:2]}/{name}"):
            raise BadFile(BadReason.FOREIGN, "it isn't named as a chunk's file is")
        body, written_s = read_body(path, key)
        if body.meta.num_bytes > self._slot_bytes:
            raise BadFile(BadReason.FOREIGN, f"its {body.meta.num_bytes} bytes don't fit slots of {self._slot_bytes}")
        if max_age_s is not None and written_s < time.time() - max_age_s:
            raise BadFile(BadReason.OLD, f"it was written more than {max_age_s:g} s ago")
        return body


def _discard(path: str) -> None:
    """Whatever it is. Raises OSError."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        shutil.rmtree(path)


def _key_of(name: str) -> ChunkKey | None:
    try:
        key = bytes.fromhex(name)
    except ValueError:
        return None
    return ChunkKey(key) if len(key) == KEY_BYTES and key.hex() == name else None


def _locked(path: Path) -> int:
    """A descriptor that holds the lock. Raises `StartupError` where another process has it, and OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        owner = os.pread(fd, 20, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise StartupError(
            f"the SSD tier's directory {path.parent} belongs to a live kv-tier (process {owner}): stop it, or give "
            "each node an ssd_dir of its own"
        ) from None
    except OSError:
        os.close(fd)
        raise
    return fd


def _takes_direct(folder: Path) -> bool:
    """Whether files here can be written and read past the page cache, page by page. A full disk can't say: assume so.

    Raises OSError where no file can be made at all.
    """
    probe = folder / f"probe{_UNFINISHED}"
    probe.unlink(missing_ok=True)
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        raise
    try:
        os.pwritev(fd, [mmap.mmap(-1, HEADER_BYTES)], 0)
    except OSError as error:
        return error.errno != errno.EINVAL
    finally:
        os.close(fd)
        probe.unlink(missing_ok=True)
    return True
