"""Places for payloads: where they lie, if that can be mapped by others; else in a file of our own, copied once more."""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from halfmoon.engine.vllm.messages import PlaceOf
from halfmoon.memory import SharedMap, place_of

SHM = Path("/dev/shm")


@dataclass(slots=True)
class Staged:
    """A payload as it is named to the ranks."""

    place: PlaceOf
    copy: SharedMap | None = None
    """Our file's memory; None where the payload itself is read and written."""

    def copy_out(self, payload: memoryview) -> None:
        """What the ranks have written, to where the caller wants it."""
        if self.copy is not None:
            payload[:] = memoryview(self.copy)[: len(payload)]

    def release(self) -> None:
        """Idempotent."""
        if self.copy is not None:
            Path(self.place.path).unlink(missing_ok=True)


class Staging:
    """Makes them. Arenas are `SharedMap`s, so in a running system nothing is copied here."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="halfmoon-vllm-", dir=SHM if SHM.is_dir() else None)
        self._numbers: Iterator[int] = iter(range(2**63))

    def of(self, payload: memoryview, *, is_sink: bool = False) -> Staged:
        """Raises OSError where there is no room for a copy."""
        place = place_of(payload)
        if place is not None and place.path.exists():
            return Staged(PlaceOf(str(place.path), place.offset, place.num_bytes))
        path = Path(self._folder.name) / str(next(self._numbers))
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(fd, payload.nbytes)
            copy = SharedMap(fd, payload.nbytes, path)
        finally:
            os.close(fd)
        if not is_sink:
            copy[:] = payload.cast("B") if payload.format != "B" else payload
        return Staged(PlaceOf(str(path), 0, payload.nbytes), copy)

    def close(self) -> None:
        self._folder.cleanup()
