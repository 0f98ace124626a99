"""Keeps eviction policies informed of a pool's registered chunks, and asks them for victims."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from halfmoon.eviction import Prompt
from halfmoon.kv_tier.quotas import TierBook
from halfmoon.kv_tier.slots import Evicted, SlotTable
from halfmoon.kv_tier.state import SlotState
from halfmoon.kv_tier.tenant_policies import Part, Policy, TenantPolicies
from halfmoon.schemas.chunks import ChunkMeta
from halfmoon.schemas.ids import ChunkKey, RequestId, TenantId

_MAX_PROMPTS = 4096


class Evictor:
    """What the policies hear: chunks registered, used, and gone. Pure; times are passed in."""

    def __init__(self, make_policy: Callable[[], Policy], slots: SlotTable, book: TierBook, slot_bytes: int) -> None:
        """`book` counts what is registered in `slots`."""
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._policies = TenantPolicies(
            make_policy,
            book,
            find=self._meta_of,
            is_evictable=self._is_ready,
            rank=self._rank,
            first_of=self._surplus_of,
        )
        self._prompts: OrderedDict[RequestId, Prompt] = OrderedDict()
        """Of the latest requests, the oldest first: chunks are committed some time after the prompt came."""
        self._num_prompts = 0
        self._now_ns = 0
        self._surplus: dict[ChunkKey, None] = {}
        """Chunks that enough other nodes hold, as far as is known: they go before all others."""

    def set_surplus(self, keys: Iterable[ChunkKey]) -> None:
        """From now on these are surplus, and no others; what goes first comes first."""
        self._surplus = dict.fromkeys(keys)

    def doubt_surplus(self, keys: Iterable[ChunkKey]) -> None:
        """Another node has let go of these: whether enough others hold them has to be asked again."""
        for key in keys:
            self._surplus.pop(key, None)

    def is_surplus(self, key: ChunkKey) -> bool:
        return key in self._surplus

    @property
    def num_surplus(self) -> int:
        return len(self._surplus)

    def asked(self, request_id: RequestId, num_chunks: int, cached: Iterable[ChunkKey], now_ns: int) -> None:
        """A prompt of so many chunks has come, and the pool has these of them, from the first to the last."""
        slots = [slot for key in cached if (slot := self._slots.find(key)) is not None and slot.registered]
        prompt = self._open(request_id, num_chunks, len(slots), now_ns)
        for slot in slots:
            assert slot.meta is not None
            self._surplus.pop(slot.meta.key, None)
            self._policies.access(slot.meta, prompt)

    def registered(self, metas: Iterable[ChunkMeta], now_ns: int, request_id: RequestId | None = None) -> None:
        """The pool has these chunks from now on: for this request, or (None) for those that computed them."""
        for meta in metas:
            user = request_id or meta.request_id
            prompt = self._prompts.get(user)
            if prompt is None:
                prompt = self._open(user, meta.index + 1, meta.index, now_ns)
            self._policies.insert(meta, prompt)

    def gone(self, gone: Iterable[Evicted], now_ns: int, *, evicted: bool) -> None:
        """The pool has these chunks no more, or another copy of them in their place."""
        for each in gone:
            self._surplus.pop(each.meta.key, None)
            part_of = self._policies.part_of
            if each.successor is not None and part_of(each.successor.tenant) == part_of(each.meta.tenant):
                continue
            self._policies.remove(each.meta, evicted=evicted)
            if each.successor is not None:
                self.registered([each.successor], now_ns)

    def victims(self, num_slots: int, tenant: TenantId | None = None) -> list[int]:
        """The slots to free so that `num_slots` become available, to this tenant's new chunks or (None) to nobody's.

        Fewer where no more are ready, or the others' are within their reserves. See `TenantPolicies.victims`.
        """
        wanted = min(num_slots, self._slots.counts().ready)
        return self._numbers(self._policies.victims(wanted, self._slot_bytes, tenant))

    def own_victims(self, num_slots: int, tenant: TenantId) -> list[int]:
        """Ready slots of a tenant with limits, at most so many."""
        return self._numbers(self._policies.own_victims(num_slots, tenant))

    def __len__(self) -> int:
        """How many chunks the policies have in mind: as many as are registered."""
        return len(self._policies)

    def _numbers(self, keys: Iterable[ChunkKey]) -> list[int]:
        return [slot.number for slot in map(self._slots.find, keys) if slot is not None]

    def _surplus_of(self, part: Part) -> Iterator[ChunkKey]:
        for key in self._surplus:
            meta = self._meta_of(key)
            if meta is not None and self._is_ready(key) and self._policies.part_of(meta.tenant) == part:
                yield key

    def _meta_of(self, key: ChunkKey) -> ChunkMeta | None:
        slot = self._slots.find(key)
        return None if slot is None else slot.meta

    def _is_ready(self, key: ChunkKey) -> bool:
        slot = self._slots.find(key)
        return slot is not None and slot.registered and slot.state is SlotState.READY

    def _open(self, request_id: RequestId, num_chunks: int, num_cached: int, now_ns: int) -> Prompt:
        self._num_prompts += 1
        self._now_ns = max(self._now_ns, now_ns)
        prompt = self._prompts[request_id] = Prompt(self._num_prompts, self._now_ns, num_chunks, num_cached)
        self._prompts.move_to_end(request_id)
        if len(self._prompts) > _MAX_PROMPTS:
            self._prompts.popitem(last=False)
        return prompt

    def _rank(self, key: ChunkKey) -> tuple[int, int]:
        """Between policies: what is surplus first, then what is unused for longest."""
        slot = self._slots.find(key)
        return key not in self._surplus, 0 if slot is None else slot.last_access_ns
