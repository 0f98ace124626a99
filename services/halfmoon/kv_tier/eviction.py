"""Keeps an eviction policy informed of a pool's registered chunks, and asks it for victims."""

from collections import OrderedDict
from collections.abc import Iterable

from halfmoon.eviction import ChunkFacts, EvictionPolicy, Prompt
from halfmoon.kv_tier.slots import Evicted, SlotTable
from halfmoon.kv_tier.state import SlotState
from halfmoon.schemas.chunks import ChunkMeta
from halfmoon.schemas.ids import ChunkKey, RequestId

_MAX_PROMPTS = 4096


class Evictor:
    """What the policy hears: chunks registered, used, and gone. Pure; times are passed in."""

    def __init__(self, policy: EvictionPolicy[ChunkKey], slots: SlotTable) -> None:
        self._policy = policy
        self._slots = slots
        self._prompts: OrderedDict[RequestId, Prompt] = OrderedDict()
        """Of the latest requests, the oldest first: chunks are committed some time after the prompt came."""
        self._num_prompts = 0
        self._now_ns = 0

    def asked(self, request_id: RequestId, num_chunks: int, cached: Iterable[ChunkKey], now_ns: int) -> None:
        """A prompt of so many chunks has come, and the pool has these of them, from the first to the last."""
        keys = [key for key in cached if self._is_registered(key)]
        prompt = self._open(request_id, num_chunks, len(keys), now_ns)
        for key in keys:
            self._policy.access(key, prompt)

    def registered(self, metas: Iterable[ChunkMeta], now_ns: int) -> None:
        """The pool has these chunks from now on."""
        for meta in metas:
            prompt = self._prompts.get(meta.request_id)
            if prompt is None:
                prompt = self._open(meta.request_id, meta.index + 1, meta.index, now_ns)
            self._policy.insert(meta.key, ChunkFacts(meta.parent, meta.index), prompt)

    def gone(self, gone: Iterable[Evicted], *, evicted: bool) -> None:
        """The pool has these chunks no more, or another copy of them in their place."""
        for each in gone:
            if each.successor is None:
                self._policy.remove(each.meta.key, evicted=evicted)

    def victims(self, num_slots: int) -> list[int]:
        """The slots to free so that `num_slots` become available. Fewer where no more are ready."""
        wanted = min(num_slots, self._slots.counts().ready)
        if wanted <= 0:
            return []
        slots = map(self._slots.find, self._policy.victims(wanted, self._is_ready))
        return [slot.number for slot in slots if slot is not None]

    def __len__(self) -> int:
        """How many chunks the policy has in mind: as many as are registered."""
        return len(self._policy)

    def _is_ready(self, key: ChunkKey) -> bool:
        slot = self._slots.find(key)
        return slot is not None and slot.registered and slot.state is SlotState.READY

    def _is_registered(self, key: ChunkKey) -> bool:
        slot = self._slots.find(key)
        return slot is not None and slot.registered

    def _open(self, request_id: RequestId, num_chunks: int, num_cached: int, now_ns: int) -> Prompt:
        self._num_prompts += 1
        self._now_ns = max(self._now_ns, now_ns)
        prompt = self._prompts[request_id] = Prompt(self._num_prompts, self._now_ns, num_chunks, num_cached)
        self._prompts.move_to_end(request_id)
        if len(self._prompts) > _MAX_PROMPTS:
            self._prompts.popitem(last=False)
        return prompt
