"""Writes a recording: a line at a time, each by one system call, so that the file is valid whenever it is looked at."""

from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from halfmoon.traces.recording import BLOCK_TOKENS, FORMAT, VERSION, AnyLine, Header


class RecordingFile:
    """A new file; an existing one is never written over. Raises `OSError`."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("xb", buffering=0)
        self._encoder = msgspec.json.Encoder()
        started = datetime.now(UTC).isoformat(timespec="seconds")
        self.write(Header(format=FORMAT, version=VERSION, block_tokens=BLOCK_TOKENS, started=started))

    def write(self, line: AnyLine) -> None:
        self._stream.write(self._encoder.encode(line) + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stream.close()
