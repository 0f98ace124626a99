"""Keeps the chunk index true: the registry's snapshot, then the stream from there, and both again after a gap.

While the registry is away, serving goes on with the index as it is, at first an empty one: prompts then cost more,
and are answered all the same.
"""

import asyncio
import random

import structlog

from halfmoon.bus.endpoint import Endpoint, call, read_stream
from halfmoon.bus.errors import BusError, StreamGap
from halfmoon.bus.protocol import Bus
from halfmoon.conductor.index import ChunkIndex
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkEvent, ChunkPlacement
from halfmoon.schemas.registry import Snapshot, SnapshotPage

FIRST_RETRY_S = 0.25
MAX_RETRY_S = 3.0
MAX_PAGES = 100_000


class Indexer:
    """Owns the index. `run` is its one task, cancelled by its owner."""

    def __init__(
        self,
        bus: Bus,
        log: structlog.stdlib.BoundLogger,
        *,
        page_timeout_s: float,
        first_retry_s: float = FIRST_RETRY_S,
    ) -> None:
        self._bus = bus
        self._log = log
        self._page_timeout_s = page_timeout_s
        self._first_retry_s = first_retry_s
        self.index = ChunkIndex()
        self.is_current = False
        """Whether the stream is being followed, from a snapshot on."""
        self.num_rebuilds = 0

    async def run(self) -> None:
        """Build, follow, and build again; until cancelled."""
        retry_s = self._first_retry_s
        while True:
            gap = asyncio.Event()
            endpoint: Endpoint | None = None
            try:
                endpoint = await self._build(gap)
                retry_s = self._first_retry_s
                await gap.wait()
            except (BusError, TimeoutError) as error:
                self._log.warning(
                    "no chunk index yet: prompts may be computed again", error=str(error), retry_s=retry_s
                )
                await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
                retry_s = min(2 * retry_s, MAX_RETRY_S)
            finally:
                self.is_current = False
                if endpoint is not None:
                    await endpoint.unsubscribe()

    async def _build(self, gap: asyncio.Event) -> Endpoint:
        placements, stream_seq = await self._snapshot()
        index = ChunkIndex.of(placements)

        async def on_event(seq: int, event: ChunkEvent) -> None:
            index.apply(event)

        async def on_gap(error: StreamGap) -> None:
            self._log.warning("chunk events were missed: building the index anew", error=str(error))
            gap.set()

        endpoint: Endpoint = await read_stream(
            self._bus, subjects.CHUNKS_STREAM, ChunkEvent, on_event, start_seq=stream_seq + 1, on_gap=on_gap
        )
        self.index = index
        self.is_current = True
        self.num_rebuilds += 1
        self._log.info("chunk index built", num_chunks=len(index), stream_seq=stream_seq)
        return endpoint

    async def _snapshot(self) -> tuple[list[ChunkPlacement], int]:
        placements: list[ChunkPlacement] = []
        ask = Snapshot()
        for _ in range(MAX_PAGES):
            page = await call(
                self._bus, subjects.registry("snapshot"), ask, SnapshotPage, timeout_s=self._page_timeout_s
            )
            placements += page.placements
            if page.cursor is None:
                return placements, page.stream_seq
            ask = Snapshot(cursor=page.cursor, revision=page.revision)
        raise BusError(f"the registry's snapshot has more than {MAX_PAGES} pages")
