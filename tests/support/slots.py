"""Slots of a real arena, as a kv-tier would hand them out, for tests of an engine alone."""

from pathlib import Path

from halfmoon.chunks.checksum import checksum
from halfmoon.engine.contract import ChunkSink
from halfmoon.pool.arena import Arena, aligned


class Slots:
    """Owns an arena in shared memory. One thread."""

    def __init__(self, path: Path, payload_bytes: int, num_slots: int) -> None:
        self.path = path
        self._arena = Arena.create(path, aligned(payload_bytes), num_slots)
        self._next = 0

    def memory(self, num_bytes: int) -> memoryview:
        """A slot's first bytes, zeroed. Fails the test where it takes more slots than there are."""
        assert self._next < self._arena.num_slots, f"more than {self._arena.num_slots} slots"
        payload = self._arena.slot(self._next, num_bytes)
        payload[:] = bytes(num_bytes)
        self._next += 1
        return payload

    @property
    def num_taken(self) -> int:
        return self._next

    def reset(self, num_kept: int = 0) -> None:
        """All slots but the first `num_kept` are free again."""
        self._next = num_kept

    def close(self) -> None:
        self._arena.close()
        self._arena.unlink()


def checksums(chunks: list[ChunkSink]) -> list[bytes]:
    return [checksum(chunk.payload) for chunk in chunks]
