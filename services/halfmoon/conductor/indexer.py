"""Keeps the chunk index true: the registry's snapshot, then the stream from there, and both again after a gap.

A snapshot leaves out what lost nodes hold. The stream won't tell it again when such a node comes back in the same epoch
(cut off, and not restarted), so then the snapshot is taken anew.

While the registry is away, serving goes on with the index as it is, at first an empty one: prompts then cost more,
and are answered all the same.
"""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from halfmoon.bus.endpoint import Endpoint, call, read_stream
from halfmoon.bus.errors import BusError, StreamGap
from halfmoon.bus.protocol import Bus
from halfmoon.scheduling.index import ChunkIndex
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkEvent
from halfmoon.schemas.ids import NodeId
from halfmoon.schemas.registry import Snapshot, SnapshotPage

FIRST_RETRY_S = 0.25
MAX_RETRY_S = 3.0
MAX_PAGES = 100_000
CHECK_S = 0.5
"""How often it is looked whether a node has come back of which the snapshot left out the chunks."""


@dataclass(slots=True)
class _Snapshot:
    """All pages of one, put into an index as they come: the pages of a large cluster are many times larger than it."""

    index: ChunkIndex = field(default_factory=ChunkIndex)
    stream_seq: int = 0
    epochs: dict[NodeId, int] = field(default_factory=dict)
    lost: tuple[NodeId, ...] = ()

    def hidden(self) -> dict[NodeId, int]:
        """Lost nodes, with the epoch in which they may come back."""
        return {node: self.epochs[node] for node in self.lost if node in self.epochs}


class Indexer:
    """Owns the index. `run` is its one task, cancelled by its owner."""

    def __init__(
        self,
        bus: Bus,
        log: structlog.stdlib.BoundLogger,
        *,
        live: Callable[[], Mapping[NodeId, int]],
        page_timeout_s: float,
        first_retry_s: float = FIRST_RETRY_S,
        check_s: float = CHECK_S,
    ) -> None:
        """`live`: the pools that are there now, with their epochs."""
        self._bus = bus
        self._log = log
        self._live = live
        self._check_s = check_s
        self._hidden: dict[NodeId, int] = {}
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
                await self._until_untrue(gap)
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
        snapshot = await self._snapshot()
        index = snapshot.index

        async def on_event(seq: int, event: ChunkEvent) -> None:
            index.apply(event)

        async def on_gap(error: StreamGap) -> None:
            self._log.warning("chunk events were missed: building the index anew", error=str(error))
            gap.set()

        endpoint: Endpoint = await read_stream(
            self._bus, subjects.CHUNKS_STREAM, ChunkEvent, on_event, start_seq=snapshot.stream_seq + 1, on_gap=on_gap
        )
        self.index = index
        self._hidden = snapshot.hidden()
        self.is_current = True
        self.num_rebuilds += 1
        self._log.info("chunk index built", num_chunks=len(index), stream_seq=snapshot.stream_seq)
        return endpoint

    async def _until_untrue(self, gap: asyncio.Event) -> None:
        """Until events were missed, or a node is back of which the index knows nothing."""
        while not gap.is_set():
            # The registry may take it for lost a moment longer than its heartbeats are heard here: then once more.
            timeout_s = self._check_s * random.uniform(0.8, 1.2) if self._hidden else None
            try:
                async with asyncio.timeout(timeout_s):
                    await gap.wait()
            except TimeoutError:
                live = self._live()
                back = [node for node, epoch in self._hidden.items() if live.get(node) == epoch]
                if back:
                    self._log.info("lost nodes are back: building the index anew", nodes=back)
                    return

    async def _snapshot(self) -> _Snapshot:
        snapshot = _Snapshot()
        ask = Snapshot()
        for _ in range(MAX_PAGES):
            page = await call(
                self._bus, subjects.registry("snapshot"), ask, SnapshotPage, timeout_s=self._page_timeout_s
            )
            if ask.cursor is None:
                snapshot.epochs, snapshot.lost = page.epochs, page.lost
                snapshot.index = ChunkIndex.of((), page.epochs)
            snapshot.index.admit(page.placements)
            if page.cursor is None:
                snapshot.stream_seq = page.stream_seq
                return snapshot
            ask = Snapshot(cursor=page.cursor, revision=page.revision)
        raise BusError(f"the registry's snapshot has more than {MAX_PAGES} pages")
