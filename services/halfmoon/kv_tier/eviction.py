"""Keeps eviction policies informed of a pool's registered chunks, and asks them for victims.

Tenants with limits have a policy each, all others share one. So a policy never has to pass over chunks that a tenant
may not touch, however many there are. Between policies, the one whose next victim is unused for longest gives it up.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from halfmoon.eviction import ChunkFacts, EvictionPolicy, Prompt
from halfmoon.kv_tier.quotas import TierBook
from halfmoon.kv_tier.slots import Evicted, Slot, SlotTable
from halfmoon.kv_tier.state import SlotState
from halfmoon.schemas.chunks import ChunkMeta
from halfmoon.schemas.ids import ChunkKey, RequestId, TenantId

_MAX_PROMPTS = 4096
_COMPARED_AT_ONCE = 8
"""Policies whose victims are compared, those of the tenants farthest above their reserves first."""

Policy = EvictionPolicy[ChunkKey]
_Part = TenantId | None
"""Whose policy: a tenant's with limits, or (None) that of all others."""
_Chosen = dict[int, _Part]
"""Slots to free, in that order, and the policies that gave them up."""


class Evictor:
    """What the policies hear: chunks registered, used, and gone. Pure; times are passed in."""

    def __init__(self, make_policy: Callable[[], Policy], slots: SlotTable, book: TierBook, slot_bytes: int) -> None:
        """`book` counts what is registered in `slots`."""
        self._make_policy = make_policy
        self._slots = slots
        self._book = book
        self._slot_bytes = slot_bytes
        self._policies: dict[_Part, Policy] = {None: make_policy()}
        """A tenant's while it has chunks."""
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
            self._policies[self._part_of(slot.meta.tenant)].access(slot.meta.key, prompt)

    def registered(self, metas: Iterable[ChunkMeta], now_ns: int, request_id: RequestId | None = None) -> None:
        """The pool has these chunks from now on: for this request, or (None) for those that computed them."""
        for meta in metas:
            user = request_id or meta.request_id
            prompt = self._prompts.get(user)
            if prompt is None:
                prompt = self._open(user, meta.index + 1, meta.index, now_ns)
            part = self._part_of(meta.tenant)
            if part not in self._policies:
                self._policies[part] = self._make_policy()
            self._policies[part].insert(meta.key, ChunkFacts(meta.parent, meta.index), prompt)

    def gone(self, gone: Iterable[Evicted], now_ns: int, *, evicted: bool) -> None:
        """The pool has these chunks no more, or another copy of them in their place."""
        for each in gone:
            self._surplus.pop(each.meta.key, None)
            part = self._part_of(each.meta.tenant)
            if each.successor is not None and self._part_of(each.successor.tenant) == part:
                continue
            policy = self._policies[part]
            policy.remove(each.meta.key, evicted=evicted)
            if part is not None and not len(policy) and not self._book.is_named(part):
                del self._policies[part]
            if each.successor is not None:
                self.registered([each.successor], now_ns)

    def victims(self, num_slots: int, tenant: TenantId | None = None) -> list[int]:
        """The slots to free so that `num_slots` become available, to this tenant's new chunks or (None) to nobody's.
        Fewer where no more are ready, or the others' are within their reserves.

        What would be beyond the tenant's quota takes the place of its own chunks, as far as they are ready; what is
        within its reserve takes the place of others', as far as they may go.
        """
        wanted = min(num_slots, self._slots.counts().ready)
        if wanted <= 0:
            return []
        chosen: _Chosen = {}
        own = None if tenant is None else self._part_of(tenant)
        if own is not None:
            excess = self._book.num_excess(own, wanted, self._slot_bytes)
            self._take(chosen, excess, [own], own)
            reserved = self._book.num_reserved(own, wanted - excess, self._slot_bytes)
            self._take(chosen, reserved, [part for part in self._policies if part != own], own)
        self._take(chosen, wanted - len(chosen), self._policies, own)
        return list(chosen)

    def own_victims(self, num_slots: int, tenant: TenantId) -> list[int]:
        """Ready slots of a tenant with limits, at most so many."""
        chosen: _Chosen = {}
        self._take(chosen, num_slots, [self._part_of(tenant)], tenant)
        return list(chosen)

    def __len__(self) -> int:
        """How many chunks the policies have in mind: as many as are registered."""
        return sum(map(len, self._policies.values()))

    def _take(self, chosen: _Chosen, num_slots: int, parts: Iterable[_Part], own: _Part) -> None:
        """Add at most so many victims to the chosen, from these policies, on behalf of a tenant of the policy `own`."""
        if num_slots <= 0:
            return
        wanted = len(chosen) + num_slots
        taken = Counter(chosen.values())
        allowed = {
            part: allowed for part in parts if part in self._policies and (allowed := self._num_allowed(part, own))
        }
        by_number = sorted(allowed, key=allowed.__getitem__, reverse=True)
        for start in range(0, len(by_number), _COMPARED_AT_ONCE):
            some = by_number[start : start + _COMPARED_AT_ONCE]
            offers = [
                [(slot, part) for slot in self._offer(part, min(allowed[part], taken[part] + num_slots), chosen)]
                for part in some
            ]
            for slot, part in heapq.merge(*offers, key=self._rank):
                if len(chosen) == wanted:
                    return
                chosen[slot.number] = part

    def _num_allowed(self, part: _Part, own: _Part) -> int:
        """How many chunks may be taken there."""
        num_chunks = len(self._policies[part])
        if part is None or part == own:
            return num_chunks
        return min(num_chunks, self._book.spare_bytes(part) // self._slot_bytes)

    def _offer(self, part: _Part, num_slots: int, chosen: _Chosen) -> list[Slot]:
        """The first so many that this policy would give up, without those that are chosen already."""
        keys = dict.fromkeys(islice(self._surplus_of(part), num_slots))
        if len(keys) < num_slots:
            keys |= dict.fromkeys(self._policies[part].victims(num_slots, self._is_ready))
        slots = map(self._slots.find, islice(keys, num_slots))
        return [slot for slot in slots if slot is not None and slot.number not in chosen]

    def _surplus_of(self, part: _Part) -> Iterator[ChunkKey]:
        for key in self._surplus:
            slot = self._slots.find(key)
            if slot is None or slot.meta is None or not self._is_ready(key):
                continue
            if self._part_of(slot.meta.tenant) == part:
                yield key

    def _is_ready(self, key: ChunkKey) -> bool:
        slot = self._slots.find(key)
        return slot is not None and slot.registered and slot.state is SlotState.READY

    def _part_of(self, tenant: TenantId) -> _Part:
        return tenant if self._book.is_apart(tenant) else None

    def _open(self, request_id: RequestId, num_chunks: int, num_cached: int, now_ns: int) -> Prompt:
        self._num_prompts += 1
        self._now_ns = max(self._now_ns, now_ns)
        prompt = self._prompts[request_id] = Prompt(self._num_prompts, self._now_ns, num_chunks, num_cached)
        self._prompts.move_to_end(request_id)
        if len(self._prompts) > _MAX_PROMPTS:
            self._prompts.popitem(last=False)
        return prompt

    def _rank(self, offer: tuple[Slot, _Part]) -> tuple[bool, int]:
        """Between policies: what is surplus first, then what is unused for longest."""
        slot = offer[0]
        return slot.key not in self._surplus, slot.last_access_ns
