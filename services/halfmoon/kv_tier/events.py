"""Telling the cluster what this pool holds: chunk events into the stream `CHUNKS`, in order, none lost.

What waits to be told is kept per chunk, not as a list of messages: a registration and the eviction that follows it
cancel out. So however long the broker is away, no more waits than twice the number of slots, and nothing needs to be
dropped. One task publishes; it retries until the broker has stored the event, and only then goes on to the next.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from halfmoon.schemas.chunks import ChunkEvent, ChunkEvicted, ChunkMeta, ChunkRegistered, EvictReason, NodeCleared
from halfmoon.schemas.ids import ChunkKey, NodeId

Publish = Callable[[ChunkEvent], Awaitable[None]]
"""Stores one event; raises where that failed or isn't certain."""

_MAX_CHUNKS = 256
"""Per event: about 64 kB."""


class Outbox:
    """What the cluster doesn't know yet. Pure: `next_event` says what to tell, `told` that it was heard."""

    def __init__(self, node: NodeId, epoch: int) -> None:
        self._node = node
        self._epoch = epoch
        self._cleared = False
        self._pending: dict[ChunkKey, ChunkMeta | EvictReason] = {}
        self._believed: set[ChunkKey] = set()
        """What the cluster may think is here."""

    @property
    def pending(self) -> int:
        """Chunks with news."""
        return len(self._pending)

    def registered(self, chunks: Iterable[ChunkMeta]) -> None:
        for chunk in chunks:
            self._pending.pop(chunk.key, None)
            self._pending[chunk.key] = chunk

    def evicted(self, keys: Iterable[ChunkKey], reason: EvictReason) -> None:
        for key in keys:
            self._pending.pop(key, None)
            if key in self._believed:
                self._pending[key] = reason

    def doubted(self, keys: Iterable[ChunkKey]) -> None:
        """The cluster may think that these are here, and they are not."""
        for key in keys:
            self._believed.add(key)
            self._pending[key] = EvictReason.CAPACITY

    def next_event(self) -> ChunkEvent | None:
        """The oldest news, and what follows of its kind; None where there is none. May be asked again."""
        if not self._cleared:
            return NodeCleared(node=self._node, epoch=self._epoch)
        chunks: list[ChunkMeta] = []
        keys: list[ChunkKey] = []
        reason: EvictReason | None = None
        for key, news in self._pending.items():
            if isinstance(news, EvictReason):
                if chunks or (reason is not None and news is not reason) or len(keys) == _MAX_CHUNKS:
                    break
                reason = news
                keys.append(key)
            else:
                if keys or len(chunks) == _MAX_CHUNKS:
                    break
                chunks.append(news)
        if reason is not None:
            return ChunkEvicted(node=self._node, epoch=self._epoch, keys=tuple(keys), reason=reason)
        return ChunkRegistered(node=self._node, epoch=self._epoch, chunks=tuple(chunks)) if chunks else None

    def telling(self, event: ChunkEvent) -> None:
        """This event is about to be published: whether it succeeds or not, the cluster may know it."""
        if isinstance(event, ChunkRegistered):
            self._believed.update(chunk.key for chunk in event.chunks)

    def told(self, event: ChunkEvent) -> None:
        """This event is stored. News that came since about the same chunks stays."""
        match event:
            case NodeCleared():
                self._cleared = True
            case ChunkRegistered():
                for chunk in event.chunks:
                    if self._pending.get(chunk.key) is chunk:
                        del self._pending[chunk.key]
            case ChunkEvicted():
                for key in event.keys:
                    self._believed.discard(key)
                    if self._pending.get(key) is event.reason:
                        del self._pending[key]


class Announcer:
    """Publishes an outbox. `run` is one task's whole work; its owner cancels it."""

    def __init__(
        self, outbox: Outbox, publish: Publish, on_failure: Callable[[Exception], None], *, max_retry_s: float = 2.0
    ) -> None:
        """`on_failure` hears of each failed attempt; the event is tried again, at most `max_retry_s` later."""
        self.outbox = outbox
        self._publish = publish
        self._on_failure = on_failure
        self._max_retry_s = max_retry_s
        self._news = asyncio.Event()
        self._quiet = asyncio.Event()
        self.num_failures = 0

    def registered(self, chunks: Iterable[ChunkMeta]) -> None:
        self.outbox.registered(chunks)
        self._wake()

    def evicted(self, keys: Iterable[ChunkKey], reason: EvictReason) -> None:
        self.outbox.evicted(keys, reason)
        self._wake()

    def doubted(self, keys: Iterable[ChunkKey]) -> None:
        self.outbox.doubted(keys)
        self._wake()

    async def run(self) -> None:
        """Never returns."""
        retry_s = 0.05
        while True:
            event = self.outbox.next_event()
            if event is None:
                self._quiet.set()
                self._news.clear()
                await self._news.wait()
                continue
            self.outbox.telling(event)
            try:
                await self._publish(event)
            except Exception as error:
                # Whatever it was, the event must be told: the failure is reported, and the event tried again.
                self.num_failures += 1
                self._on_failure(error)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, self._max_retry_s)
                continue
            self.outbox.told(event)
            retry_s = 0.05

    async def quiet(self, timeout_s: float) -> bool:
        """Wait until everything is told; False where that takes longer."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True

    def _wake(self) -> None:
        self._quiet.clear()
        self._news.set()
