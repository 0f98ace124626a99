"""The pool of one simulated node: which chunks it holds, under the same eviction policies as a kv-tier."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from halfmoon.eviction import ChunkFacts, EvictionPolicy, PolicyName, Prompt, make_policy
from halfmoon.schemas.chunks import ChunkEvent, ChunkEvicted, ChunkMeta, ChunkRegistered, EvictReason
from halfmoon.schemas.ids import ChunkKey, NodeId, RequestId

EPOCH = 1
_NOBODY = RequestId("")


class NodeCache:
    """What is pinned (about to be read) stays. As in a kv-tier, room is made before chunks are stored."""

    def __init__(self, node: NodeId, num_chunks: int, eviction: PolicyName, tell: Callable[[ChunkEvent], None]) -> None:
        self._node = node
        self._num_chunks = num_chunks
        self._policy: EvictionPolicy[ChunkKey] | None = (
            make_policy(eviction, num_chunks, ChunkKey) if num_chunks else None
        )
        self._held: set[ChunkKey] = set()
        self._pins: Counter[ChunkKey] = Counter()
        self._tell = tell
        self._num_prompts = 0

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter(self._held)

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    def num_leading(self, keys: Sequence[ChunkKey]) -> int:
        held = self._held
        for count, key in enumerate(keys):
            if key not in held:
                return count
        return len(keys)

    def pin(self, keys: Iterable[ChunkKey]) -> None:
        self._pins.update(keys)

    def unpin(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            if self._pins[key] > 1:
                self._pins[key] -= 1
            else:
                self._pins.pop(key)

    def store(self, keys: Sequence[ChunkKey], now_s: float) -> None:
        """A prompt's chunks, from the first on: those that are there are used, the others stored as far as there is
        room. Tells of what is new, and of what had to go."""
        if self._policy is None or not keys:
            return
        self._num_prompts += 1
        prompt = Prompt(self._num_prompts, round(now_s * 1e9), len(keys), self.num_leading(keys))
        for key in keys:
            if key in self._held:
                self._policy.access(key, prompt)
        new = [(depth, key) for depth, key in enumerate(keys) if key not in self._held]
        self._make_room(len(self._held) + len(new) - self._num_chunks, keys)
        stored = []
        for depth, key in new[: self._num_chunks - len(self._held)]:
            parent = keys[depth - 1] if depth else None
            self._policy.insert(key, ChunkFacts(parent, depth), prompt)
            self._held.add(key)
            stored.append(_meta(key, depth, parent))
        if stored:
            self._tell(ChunkRegistered(node=self._node, epoch=EPOCH, chunks=tuple(stored)))

    def _make_room(self, num_chunks: int, keys: Sequence[ChunkKey]) -> None:
        if num_chunks <= 0 or self._policy is None:
            return
        pins, used = self._pins, set(keys)
        victims = self._policy.victims(num_chunks, lambda key: key not in pins and key not in used)
        for key in victims:
            self._policy.remove(key)
            self._held.remove(key)
        if victims:
            self._tell(ChunkEvicted(node=self._node, epoch=EPOCH, keys=tuple(victims), reason=EvictReason.CAPACITY))


def _meta(key: ChunkKey, depth: int, parent: ChunkKey | None) -> ChunkMeta:
    return ChunkMeta(
        key=key, index=depth, num_tokens=0, num_bytes=0, checksum=b"", request_id=_NOBODY, created_ns=0, parent=parent
    )
