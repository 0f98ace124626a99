"""The book of the SSD tier: which chunks lie there, and which go when it is full. Pure; times are passed in."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import msgspec

from halfmoon.eviction import Prompt
from halfmoon.kv_tier.quotas import TierBook
from halfmoon.kv_tier.ssd.file import HEADER_BYTES, FileBody, file_bytes
from halfmoon.kv_tier.tenant_policies import Policy, TenantPolicies
from halfmoon.schemas.chunks import ChunkMeta, Tier
from halfmoon.schemas.ids import ChunkKey, RequestId, TenantId


@dataclass(slots=True)
class SsdChunk:
    """A chunk with a whole file."""

    meta: ChunkMeta
    """With `tier` SSD, as it is announced."""
    traceparent: str | None
    used_ns: int
    read_at: int | None = None
    """When it was last read from the SSD, in chunks that the pool had taken in; see `reuse`."""
    read_by: RequestId | None = None

    @property
    def num_bytes(self) -> int:
        """Of its file."""
        return file_bytes(self.meta.num_bytes)


class SsdBook:
    """`num_bytes` of whole files and `num_bytes_coming` of files being written; together at most `limit_bytes`, once
    the victims are gone that the caller was named."""

    def __init__(self, make_policy: Callable[[], Policy], limit_bytes: int, quotas: TierBook) -> None:
        """`quotas` counts the payloads here, by tenant, and says what each may have."""
        self.quotas = quotas
        self._policies = TenantPolicies(
            make_policy,
            quotas,
            find=self._meta_of,
            is_evictable=lambda key: not self.is_kept(self._chunks[key].meta),
            rank=lambda key: (self._chunks[key].used_ns,),
        )
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self._chunks: dict[ChunkKey, SsdChunk] = {}
        self._coming: dict[ChunkKey, int] = {}
        """Bytes of files that are being written."""
        self._num_prompts = 0
        self._now_ns = 0
        self.is_kept: Callable[[ChunkMeta], bool] = _never
        """Chunks that eviction must leave: pinned ones."""

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, key: object) -> bool:
        return key in self._chunks

    @property
    def num_bytes_coming(self) -> int:
        return sum(self._coming.values())

    def find(self, key: ChunkKey) -> SsdChunk | None:
        return self._chunks.get(key)

    def metas(self) -> Iterator[ChunkMeta]:
        """Of all chunks with a whole file, the longest there first."""
        return (chunk.meta for chunk in self._chunks.values())

    def is_coming(self, key: ChunkKey) -> bool:
        return key in self._coming

    def begin(self, meta: ChunkMeta) -> None:
        """A file for this chunk is about to be written. Raises ValueError where one is there, or being written."""
        if meta.key in self._chunks or meta.key in self._coming:
            raise ValueError(f"chunk {meta.key.hex()} has a file already")
        self._coming[meta.key] = file_bytes(meta.num_bytes)

    def abandon(self, key: ChunkKey) -> None:
        """No file will come of it: the write failed, or nobody wants the chunk any more. Idempotent."""
        self._coming.pop(key, None)

    def finish(self, body: FileBody, now_ns: int) -> SsdChunk | None:
        """The file is whole; None where it was abandoned meanwhile, and is to be removed."""
        if self._coming.pop(body.meta.key, None) is None:
            return None
        return self.add(body, now_ns)

    def add(self, body: FileBody, now_ns: int) -> SsdChunk | None:
        """A whole file is there; None, and nothing changes, where that is beyond its tenant's quota. Raises ValueError
        where there was one."""
        meta = msgspec.structs.replace(body.meta, tier=Tier.SSD)
        if meta.key in self._chunks:
            raise ValueError(f"chunk {meta.key.hex()} has a file already")
        if not self.quotas.admit(meta):
            return None
        self._policies.insert(meta, self._prompt(meta.index, now_ns))
        chunk = self._chunks[meta.key] = SsdChunk(meta, body.traceparent, now_ns)
        self.num_bytes += chunk.num_bytes
        return chunk

    def used(self, keys: Collection[ChunkKey], num_chunks: int, now_ns: int) -> None:
        """A prompt of so many chunks uses these, from the first to the last, wherever they are read from."""
        here = [key for key in keys if key in self._chunks]
        if here:
            prompt = self._prompt(len(here), now_ns, num_chunks)
            for key in here:
                chunk = self._chunks[key]
                chunk.used_ns = now_ns
                self._policies.access(chunk.meta, prompt)

    def remove(self, key: ChunkKey, *, evicted: bool) -> SsdChunk | None:
        """Forget a chunk, and what is being written of it; what it was, or None where it has no whole file."""
        self.abandon(key)
        chunk = self._chunks.get(key)
        if chunk is None:
            return None
        self._policies.remove(chunk.meta, evicted=evicted)
        del self._chunks[key]
        self.quotas.discharge(chunk.meta)
        self.num_bytes -= chunk.num_bytes
        return chunk

    def own_victims(self, meta: ChunkMeta) -> list[ChunkKey] | None:
        """The tenant's own chunks that must go so that this one is within its quota; None where it can't be."""
        left_bytes = self.quotas.left_bytes(meta.tenant)
        missing = 0 if left_bytes is None else meta.num_bytes - left_bytes
        keys = self._enough(missing, _payload_bytes, lambda count: self._policies.own_victims(count, meta.tenant))
        return None if sum(_payload_bytes(self._chunks[key]) for key in keys) < missing else keys

    def victims(self, num_bytes: int, tenant: TenantId | None = None) -> list[ChunkKey]:
        """The chunks to remove so that `num_bytes` more fit, for this tenant's new ones; fewer where no more may go."""
        excess = self.num_bytes + self.num_bytes_coming + num_bytes - self.limit_bytes
        payload_bytes = max(1, self._average_bytes - HEADER_BYTES)
        return self._enough(excess, _file_bytes, lambda count: self._policies.victims(count, payload_bytes, tenant))

    def _enough(
        self, num_bytes: int, size_of: Callable[[SsdChunk], int], victims: Callable[[int], list[ChunkKey]]
    ) -> list[ChunkKey]:
        """As many victims as it takes to free `num_bytes`, or all there are. `victims` names so many at most."""
        if num_bytes <= 0:
            return []
        count = -(-num_bytes // self._average_bytes)
        while True:
            keys = victims(count)
            freed = 0
            for at, key in enumerate(keys):
                freed += size_of(self._chunks[key])
                if freed >= num_bytes:
                    return keys[: at + 1]
            if len(keys) < count:
                return keys
            count *= 2

    @property
    def _average_bytes(self) -> int:
        """Of a file; 1 where there is none."""
        return max(1, self.num_bytes // max(1, len(self._chunks)))

    def check_integrity(self) -> None:
        """Raises AssertionError where the book contradicts itself."""
        assert self.num_bytes == sum(chunk.num_bytes for chunk in self._chunks.values())
        assert len(self._policies) == len(self._chunks)
        self.quotas.check(chunk.meta for chunk in self._chunks.values())
        assert not self._chunks.keys() & self._coming.keys()
        for key, chunk in self._chunks.items():
            assert (chunk.meta.key, chunk.meta.tier) == (key, Tier.SSD), chunk

    def _meta_of(self, key: ChunkKey) -> ChunkMeta | None:
        chunk = self._chunks.get(key)
        return None if chunk is None else chunk.meta

    def _prompt(self, num_cached: int, now_ns: int, num_chunks: int | None = None) -> Prompt:
        self._num_prompts += 1
        self._now_ns = max(self._now_ns, now_ns)
        return Prompt(self._num_prompts, self._now_ns, num_chunks or num_cached + 1, num_cached)


def in_order_of_use(bodies: Iterable[FileBody]) -> list[FileBody]:
    """As a book is to be told of them after a restart: the longest unused first, a prompt's chunks in its order."""
    return sorted(bodies, key=lambda body: (body.meta.last_access_ns, body.meta.index))


def _file_bytes(chunk: SsdChunk) -> int:
    return chunk.num_bytes


def _payload_bytes(chunk: SsdChunk) -> int:
    return chunk.meta.num_bytes


def _never(meta: ChunkMeta) -> bool:
    return False
