"""The engine's end of the socket: orders to all ranks, and one report for what all of them have reported."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from halfmoon.engine.contract import EngineError
from halfmoon.engine.vllm.messages import (
    LENGTH,
    MAX_FRAME_BYTES,
    REPORTS,
    Bound,
    Dropped,
    Loaded,
    Order,
    Ready,
    Report,
    Written,
    frame,
)


class Channel:
    """1. `open` listens. 2. `ready` waits for every rank. 3. `send` reaches all of them. 4. `close`, idempotent."""

    def __init__(self, num_ranks: int, take: Callable[[Report], None], lost: Callable[[], None]) -> None:
        """`take` is told a report when the last rank has made it; `lost`, that a rank has gone."""
        self._num_ranks = num_ranks
        self._take = take
        self._lost = lost
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._readers: set[asyncio.Task[None]] = set()
        self._partial: dict[tuple[object, ...], list[Report]] = {}
        self._ready: asyncio.Future[list[Ready]] = asyncio.get_running_loop().create_future()

    async def open(self, path: Path) -> None:
        self._server = await asyncio.start_unix_server(self._serve, path)

    async def ready(self) -> list[Ready]:
        """What the ranks have said of themselves, in their order. The caller bounds the wait."""
        return await asyncio.shield(self._ready)

    def send(self, order: Order) -> None:
        """Orders to a rank that has gone are lost; `lost` says that it has."""
        payload = frame(order)
        for writer in self._writers:
            writer.write(payload)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._readers):
            task.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        self._ready.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._readers.add(task)
        self._writers.append(writer)
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                if length > MAX_FRAME_BYTES:
                    raise EngineError(f"a report of {length} bytes from a rank of vLLM")
                self._gather(REPORTS.decode(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, OSError, EngineError, msgspec.MsgspecError):
            self._lost()
        except asyncio.CancelledError:
            return  # Only `close` cancels, and nobody awaits this task's result.
        finally:
            self._readers.discard(task)
            self._writers.remove(writer)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _gather(self, report: Report) -> None:
        same = self._partial.setdefault(_key(report), [])
        same.append(report)
        if len(same) < self._num_ranks:
            return
        del self._partial[_key(report)]
        if isinstance(report, Ready):
            self._ready.set_result(
                sorted((each for each in same if isinstance(each, Ready)), key=lambda each: each.rank)
            )
        else:
            self._take(_together(same))


def _key(report: Report) -> tuple[object, ...]:
    """What two ranks' reports of one thing have in common."""
    match report:
        case Ready():
            return (Ready,)
        case Bound() | Dropped():
            return (type(report), report.seq)
        case Loaded():
            return (Loaded, report.seq, report.load)
        case Written():
            return (Written, report.seq, report.index)


def _together(reports: list[Report]) -> Report:
    """The one that failed, where one did; else the last, since it takes as long as the slowest."""
    failed = [each for each in reports if isinstance(each, Loaded | Written) and each.error]
    return failed[0] if failed else reports[-1]
