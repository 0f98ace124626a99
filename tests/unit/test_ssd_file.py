"""The files of the SSD tier: what is damaged in any way is never taken for a chunk, and what is whole always is."""

import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import structlog
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.chunks.checksum import checksum
from halfmoon.kv_tier.ssd.directory import SsdDirectory
from halfmoon.kv_tier.ssd.file import HEADER_BYTES, BadFile, BadReason, FileBody, encode_header, parse_header
from halfmoon.lifecycle.runtime import StartupError
from halfmoon.schemas.chunks import ChunkMeta
from halfmoon.schemas.ids import ModelName, RequestId
from support.pool_nodes import SLOT_BYTES, content_of, key_of

LOG = structlog.stdlib.get_logger("test")
MEMORY_DIR = Path("/dev/shm")


def body_of(name: str, payload: bytes, **facts: object) -> FileBody:
    meta = ChunkMeta(
        key=key_of(name),
        index=3,
        num_tokens=4,
        num_bytes=len(payload),
        checksum=checksum(payload),
        request_id=RequestId("req-1"),
        created_ns=17,
        parent=key_of("parent"),
    )
    return FileBody(meta=msgspec.structs.replace(meta, **facts), traceparent="00-aa-bb-01")


def page_aligned(payload: bytes = b"") -> memoryview:
    memory = memoryview(mmap.mmap(-1, SLOT_BYTES))
    memory[: len(payload)] = payload
    return memory


def padded_bytes(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def written(directory: SsdDirectory, name: str, num_bytes: int = 10_000) -> Path:
    payload = content_of(name, num_bytes)
    body = body_of(name, payload)
    directory.write(body, page_aligned(payload)[: padded_bytes(num_bytes)])
    return directory.path_of(body.meta.key)


@pytest.fixture(params=["disk", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SsdDirectory]:
    """On a disk, past the page cache where its file system can; and on one in memory."""
    with tempfile.TemporaryDirectory(dir=MEMORY_DIR) as in_memory:
        opened = SsdDirectory(tmp_path if request.param == "disk" else Path(in_memory), SLOT_BYTES)
        yield opened
        opened.close()


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 4097, 10_000, SLOT_BYTES])
@pytest.mark.parametrize("direct", [True, False])
def test_what_is_written_is_read_back_exactly(directory: SsdDirectory, num_bytes: int, direct: bool) -> None:
    directory.is_direct = directory.is_direct and direct
    path = written(directory, "a", num_bytes)
    assert path.stat().st_size == HEADER_BYTES + num_bytes
    assert path.stat().st_mode & 0o077 == 0
    into = page_aligned(b"x" * SLOT_BYTES)
    body = directory.read(key_of("a"), into[: padded_bytes(num_bytes)])
    assert bytes(into[:num_bytes]) == content_of("a", num_bytes)
    assert body == body_of("a", content_of("a", num_bytes))
    scan = directory.scan(None, LOG)
    assert (scan.found, sum(scan.removed.values())) == ([body], 0)


def test_a_second_write_of_a_chunk_takes_the_place_of_the_first(directory: SsdDirectory) -> None:
    path = written(directory, "a")
    path.write_bytes(b"rubbish")
    assert written(directory, "a") == path
    assert directory.read(key_of("a"), page_aligned()).meta.num_bytes == 10_000
    directory.remove(key_of("a"))
    directory.remove(key_of("a"))
    with pytest.raises(FileNotFoundError):
        directory.read(key_of("a"), page_aligned())


HEADER = encode_header(body_of("a", content_of("a", 5000)))


@given(place=st.integers(0, HEADER_BYTES - 1), change=st.integers(1, 255))
def test_no_byte_of_a_header_can_change_unnoticed(place: int, change: int) -> None:
    page = bytearray(HEADER)
    page[place] ^= change
    with pytest.raises(BadFile):
        parse_header(bytes(page), key_of("a"), HEADER_BYTES + 5000)


@settings(max_examples=60)
@given(
    place=st.one_of(st.integers(0, HEADER_BYTES + 4999), st.sampled_from([0, 7, 8, 15, 16, 24, 4095, 4096, 9095])),
    change=st.integers(1, 255),
)
def test_no_flipped_byte_of_a_file_is_ever_read(
    tmp_path_factory: pytest.TempPathFactory, place: int, change: int
) -> None:
    directory = SsdDirectory(tmp_path_factory.mktemp("ssd"), SLOT_BYTES)
    path = written(directory, "a", 5000)
    whole = bytearray(path.read_bytes())
    whole[place] ^= change
    path.write_bytes(whole)
    with pytest.raises(BadFile):
        directory.read(key_of("a"), page_aligned()[:8192])
    scan = directory.scan(None, LOG)
    # By the header alone, damage of the payload can't be seen: that is found when it is read.
    assert len(scan.found) == (place >= HEADER_BYTES)
    assert path.exists() == (place >= HEADER_BYTES)
    directory.close()


@settings(max_examples=60)
@given(
    length=st.one_of(st.integers(0, HEADER_BYTES + 5000), st.sampled_from([0, 1, 23, 24, 4095, 4096, 4097, 8192, 9095]))
)
def test_a_file_of_any_other_length_is_torn(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    directory = SsdDirectory(tmp_path_factory.mktemp("ssd"), SLOT_BYTES)
    path = written(directory, "a", 5000)
    whole = path.read_bytes()
    path.write_bytes(whole[:length] if length < len(whole) else whole + b"\0")
    with pytest.raises(BadFile) as caught:
        directory.read(key_of("a"), page_aligned()[:8192])
    assert caught.value.reason is BadReason.TORN
    assert directory.scan(None, LOG).removed == {BadReason.TORN: 1}
    assert not path.exists()
    directory.close()


def test_a_scan_removes_what_is_of_no_use_and_nothing_beside(tmp_path: Path) -> None:
    directory = SsdDirectory(tmp_path, SLOT_BYTES)
    good, other = written(directory, "good"), written(directory, "other")
    (tmp_path / "my notes").write_text("mine")
    moved = other.with_name(key_of("elsewhere").hex())
    other.rename(moved)
    misplaced = tmp_path / "chunks" / "zz"
    misplaced.mkdir()
    (misplaced / key_of("x").hex()).write_bytes(good.read_bytes())
    (good.parent / f"{good.name}-1.new").write_bytes(b"half")
    (good.parent / "folder").mkdir()
    (tmp_path / "chunks" / "stray").write_text("?")
    page = bytearray(encode_header(body_of("next", content_of("next"))))
    page[8:12] = struct.pack("<I", 2)
    digest = xxhash.xxh3_64(bytes(page[:16]) + bytes(page[24:]))
    page[16:24] = struct.pack("<Q", digest.intdigest())
    newer = directory.path_of(key_of("next"))
    newer.parent.mkdir(exist_ok=True)
    newer.write_bytes(bytes(page) + content_of("next"))
    scan = directory.scan(None, LOG)
    assert [body.meta.key for body in scan.found] == [key_of("good")]
    assert scan.removed == {BadReason.FOREIGN: 4, BadReason.VERSION: 1}
    assert scan.num_unfinished == 1
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == sorted(
        ["lock", "my notes", good.name]
    )


def test_old_files_go_and_files_too_large_for_a_slot(tmp_path: Path) -> None:
    directory = SsdDirectory(tmp_path, SLOT_BYTES)
    old = written(directory, "old")
    os.utime(old, (1_000, 1_000))
    written(directory, "large", SLOT_BYTES)
    written(directory, "young")
    directory.close()
    directory = SsdDirectory(tmp_path, 12_288)
    scan = directory.scan(3600.0, LOG)
    assert [body.meta.key for body in scan.found] == [key_of("young")]
    assert scan.removed == {BadReason.OLD: 1, BadReason.FOREIGN: 1}
    directory.close()


def test_two_nodes_do_not_share_a_directory(tmp_path: Path) -> None:
    first = SsdDirectory(tmp_path, SLOT_BYTES)
    with pytest.raises(StartupError, match=f"process {os.getpid()}.*an ssd_dir of its own"):
        SsdDirectory(tmp_path, SLOT_BYTES)
    first.close()
    first.close()
    SsdDirectory(tmp_path, SLOT_BYTES).close()


def test_a_directory_that_can_not_be_one_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="set ssd_dir to a directory of its own"):
        SsdDirectory(tmp_path / "file", SLOT_BYTES)


def test_a_description_too_long_for_a_header_is_refused() -> None:
    with pytest.raises(ValueError, match="doesn't fit a header of 4096"):
        encode_header(body_of("a", b"x", model=ModelName("m" * 5000)))


@given(st.one_of(st.binary(), st.binary().map(lambda rest: HEADER[:24] + rest)), st.integers(0, 10**6))
def test_rubbish_is_refused(page: bytes, length: int) -> None:
    with pytest.raises(BadFile):
        parse_header(page[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"), key_of("a"), length)
    with pytest.raises(BadFile):
        parse_header(page[: HEADER_BYTES - 1], key_of("a"), length)
