"""What a pool knows of its SSD beside what lies there: how chunks move between it and DRAM, and why. No I/O."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from halfmoon.kv_tier.ssd.reuse import ReuseMemory, Watermarks
from halfmoon.kv_tier.ssd.store import SsdStore
from halfmoon.schemas.chunks import ChunkMeta
from halfmoon.schemas.ids import ChunkKey, RequestId
from halfmoon.schemas.pool_stats import SsdStats


@dataclass(slots=True)
class LowerTier:
    """The SSD of one node, as its `ChunkStore` sees it."""

    ssd: SsdStore
    reuse: ReuseMemory
    promote_within: int | None = None
    """None: as far as DRAM reaches at present."""
    watermarks: Callable[[], Watermarks] = field(default=lambda: Watermarks(1.0, 1.0))
    hits: int = 0
    demotions: int = 0
    promotions: int = 0
    refused: int = 0

    def find(self, key: ChunkKey) -> ChunkMeta | None:
        chunk = self.ssd.find(key)
        return None if chunk is None else chunk.meta

    def among(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, ChunkMeta]:
        """Those of these chunks that lie there."""
        return {key: meta for key in keys if (meta := self.find(key)) is not None}

    def asked(self, request_id: RequestId, keys: Sequence[ChunkKey], now_ns: int) -> None:
        """A request asks for these chunks of its prompt, wherever they are."""
        for key in keys:
            self.reuse.used(key, request_id)
        self.ssd.book.used(keys, len(keys), now_ns)

    def registered(self, metas: Iterable[ChunkMeta], request_id: RequestId) -> None:
        """DRAM has these chunks from now on, computed or brought here for that request."""
        for meta in metas:
            self.reuse.came(meta.key, request_id, is_new=meta.request_id == request_id)

    def is_worth_writing(self, key: ChunkKey) -> bool:
        """Whether a chunk that leaves DRAM is to be written. To be asked once: refusals are counted."""
        is_worth = self.reuse.is_worth_writing(key)
        self.refused += not is_worth
        return is_worth

    def note_read(self, key: ChunkKey, request_id: RequestId) -> bool:
        """A chunk is read from the SSD for a request here; whether another did so lately enough that it is promoted.

        Prefill and decode of one request read it as one.
        """
        chunk = self.ssd.find(key)
        if chunk is None or chunk.read_by == request_id:
            return False
        last, chunk.read_at, chunk.read_by = chunk.read_at, self.reuse.clock, request_id
        return last is not None and self.reuse.clock - last <= self.window

    @property
    def window(self) -> int:
        """In chunks that the pool takes in."""
        return self.reuse.reach if self.promote_within is None else self.promote_within

    def stats(self) -> SsdStats:
        counters, marks = self.ssd.counters, self.watermarks()
        return SsdStats(
            num_chunks=len(self.ssd.book),
            num_bytes=self.ssd.book.num_bytes,
            max_bytes=self.ssd.limit_bytes,
            hits=self.hits,
            reads=counters.reads,
            writes=counters.writes,
            demotions=self.demotions,
            promotions=self.promotions,
            refused=self.refused,
            evictions=counters.evictions,
            errors=counters.errors,
            removed=dict(counters.removed),
            failure=self.ssd.failure,
            high_watermark=marks.high,
            low_watermark=marks.low,
            promote_within=self.window,
        )
