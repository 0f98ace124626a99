"""One chunk in one file of the SSD tier: a page of header, then the payload as it lay in its slot.

    | magic 8 | version u32 | body u32 | check u64 | body: msgpack | zeros to 4096 | payload, `num_bytes` |

Numbers are little-endian. `check` is xxh3-64 over the whole page but itself, so no byte of a header changes unnoticed;
the payload's own checksum is in its `ChunkMeta`, and is compared when the payload is read. A file is written under a
name of its own and then renamed, so what has a chunk's name is whole; what a power cut tore all the same has the wrong
length or the wrong checksum.
"""

import errno
import mmap
import os
import stat
import struct
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from halfmoon.chunks.checksum import checksum
from halfmoon.schemas.chunks import ChunkMeta
from halfmoon.schemas.ids import ChunkKey
from halfmoon.schemas.wire import Message

HEADER_BYTES: Final = 4096
_MAGIC: Final = b"hm-chunk"
_VERSION: Final = 1
_FIXED: Final = struct.Struct("<8sIIQ")
_CHECK_AT: Final = 16


class BadReason(StrEnum):
    """Why a file is of no use."""

    TORN = "torn"
    """Cut short, or not what was written."""
    FOREIGN = "foreign"
    """No chunk's file, or of another chunk than its name says, or too large for this pool."""
    VERSION = "version"
    """Of a format that this version doesn't read."""
    OLD = "old"


class BadFile(Exception):
    """A file that must not be served."""

    def __init__(self, reason: BadReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class FileBody(Message, frozen=True):
    """What a header says."""

    meta: ChunkMeta
    traceparent: str | None = None
    """Of the commit that made the chunk, so that its later life links back to it."""


_decoder = msgspec.msgpack.Decoder(FileBody)


def file_bytes(num_bytes: int) -> int:
    """Length of the file of a payload of `num_bytes`."""
    return HEADER_BYTES + num_bytes


def encode_header(body: FileBody) -> bytes:
    """The first page. Raises ValueError where the body doesn't fit into it."""
    packed = msgspec.msgpack.encode(body)
    if len(packed) > HEADER_BYTES - _FIXED.size:
        raise ValueError(f"a chunk's description of {len(packed)} bytes doesn't fit a header of {HEADER_BYTES}")
    page = bytearray(HEADER_BYTES)
    _FIXED.pack_into(page, 0, _MAGIC, _VERSION, len(packed), 0)
    page[_FIXED.size : _FIXED.size + len(packed)] = packed
    struct.pack_into("<Q", page, _CHECK_AT, _check_of(page))
    return bytes(page)


def parse_header(page: bytes | memoryview, key: ChunkKey, total_bytes: int) -> FileBody:
    """What the header of `key`'s file says; `total_bytes` is the file's length. Raises `BadFile`."""
    if len(page) != HEADER_BYTES:
        raise BadFile(BadReason.TORN, f"{len(page)} bytes are no header")
    magic, version, body_bytes, check = _FIXED.unpack_from(page)
    if magic != _MAGIC:
        raise BadFile(BadReason.FOREIGN, "it doesn't begin as a chunk's file does")
    if version != _VERSION:
        raise BadFile(BadReason.VERSION, f"its format is version {version}, this reads {_VERSION}")
    if check != _check_of(page) or body_bytes > HEADER_BYTES - _FIXED.size:
        raise BadFile(BadReason.TORN, "the header's checksum is wrong")
    try:
        body = _decoder.decode(page[_FIXED.size : _FIXED.size + body_bytes])
    except msgspec.MsgspecError as error:
        raise BadFile(BadReason.TORN, f"the header can't be read: {error}") from None
    if body.meta.key != key:
        raise BadFile(BadReason.FOREIGN, "it is named after another chunk")
    if total_bytes != file_bytes(body.meta.num_bytes):
        raise BadFile(BadReason.TORN, f"{total_bytes} bytes where {file_bytes(body.meta.num_bytes)} were written")
    return body


def write_file(path: Path, body: FileBody, padded: memoryview, *, direct: bool) -> None:
    """Write a new file at `path`. `padded` is the payload up to the end of its last page. Raises OSError.

    `direct`: past the page cache, from memory that begins at a page. Otherwise it is written out and dropped from the
    cache, which has better things to hold than what is in an arena already.
    """
    header = mmap.mmap(-1, HEADER_BYTES)
    header.write(encode_header(body))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)
    try:
        total = file_bytes(body.meta.num_bytes)
        whole = padded if direct else padded[: body.meta.num_bytes]
        wanted = HEADER_BYTES + len(whole)
        if _transfer(os.pwritev, fd, [memoryview(header), whole], wanted) < wanted:
            raise OSError(errno.EIO, "the file system takes no more of a file")
        if direct:
            os.ftruncate(fd, total)
        else:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def read_file(path: Path, key: ChunkKey, padded: memoryview, *, direct: bool) -> FileBody:
    """Read a whole file, its payload into `padded` (as in `write_file`), and compare both checksums.

    Raises `BadFile`, and OSError: FileNotFoundError where it is gone.
    """
    header = mmap.mmap(-1, HEADER_BYTES)
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    try:
        total = os.fstat(fd).st_size
        num_read = _transfer(os.preadv, fd, [memoryview(header), padded], total)
    finally:
        os.close(fd)
    body = parse_header(memoryview(header)[: min(num_read, HEADER_BYTES)], key, total)
    num_bytes = body.meta.num_bytes
    if num_read < total or num_bytes > len(padded):
        raise BadFile(BadReason.TORN, f"{num_read} of {total} bytes could be read")
    if checksum(padded[:num_bytes]) != body.meta.checksum:
        raise BadFile(BadReason.TORN, "the payload's checksum is wrong")
    return body


def read_body(path: str, key: ChunkKey) -> tuple[FileBody, float]:
    """The header alone, and when the file was written (Unix time). Raises as `read_file`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise BadFile(BadReason.FOREIGN, "it is a link") from None
    try:
        stats = os.fstat(fd)
        if not stat.S_ISREG(stats.st_mode):
            raise BadFile(BadReason.FOREIGN, "it is no file")
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return parse_header(os.pread(fd, HEADER_BYTES, 0), key, stats.st_size), stats.st_mtime
    finally:
        os.close(fd)


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int], fd: int, buffers: Sequence[memoryview], limit: int
) -> int:
    """Read or write the buffers, up to `limit` bytes or the end of the file; the bytes done."""
    done = 0
    left = list(buffers)
    while left and done < limit:
        moved = call(fd, left, done)
        if moved == 0:
            break
        done += moved
        while left and moved >= len(left[0]):
            moved -= len(left.pop(0))
        if left:
            left[0] = left[0][moved:]
    return done


def _check_of(page: bytes | bytearray | memoryview) -> int:
    digest = xxhash.xxh3_64()
    digest.update(page[:_CHECK_AT])
    digest.update(page[_FIXED.size :])
    return digest.intdigest()
