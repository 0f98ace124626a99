"""Eviction among tenants: whose chunks make room in one tier, and for whom. Pure.

Tenants with limits have a policy each, all others share one. So a policy never has to pass over chunks that a tenant
may not touch, however many there are. Between policies, the one whose next victim ranks lowest gives it up.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice

from halfmoon.eviction import ChunkFacts, EvictionPolicy, Prompt
from halfmoon.kv_tier.quotas import TierBook
from halfmoon.schemas.chunks import ChunkMeta
from halfmoon.schemas.ids import ChunkKey, TenantId

_COMPARED_AT_ONCE = 8
"""Policies whose victims are compared, those of the tenants farthest above their reserves first."""

Policy = EvictionPolicy[ChunkKey]
Part = TenantId | None
"""Whose policy: a tenant's with limits, or (None) that of all others."""
_Chosen = dict[ChunkKey, Part]


class TenantPolicies:
    """Policies by tenant, told of the same chunks as `book`."""

    def __init__(
        self,
        make_policy: Callable[[], Policy],
        book: TierBook,
        *,
        find: Callable[[ChunkKey], ChunkMeta | None],
        is_evictable: Callable[[ChunkKey], bool],
        rank: Callable[[ChunkKey], tuple[int, ...]],
        first_of: Callable[[Part], Iterable[ChunkKey]] | None = None,
    ) -> None:
        """`first_of`: evictable chunks of one policy that go before those that it names itself."""
        self._make_policy = make_policy
        self._book = book
        self._find = find
        self._is_evictable = is_evictable
        self._rank = rank
        self._first_of = first_of
        self._policies: dict[Part, Policy] = {None: make_policy()}
        """A tenant's while it has chunks, or is named in the settings."""

    def part_of(self, tenant: TenantId) -> Part:
        return tenant if self._book.is_apart(tenant) else None

    def insert(self, meta: ChunkMeta, prompt: Prompt) -> None:
        part = self.part_of(meta.tenant)
        if part not in self._policies:
            self._policies[part] = self._make_policy()
        self._policies[part].insert(meta.key, ChunkFacts(meta.parent, meta.index), prompt)

    def access(self, meta: ChunkMeta, prompt: Prompt) -> None:
        self._policies[self.part_of(meta.tenant)].access(meta.key, prompt)

    def remove(self, meta: ChunkMeta, *, evicted: bool) -> None:
        part = self.part_of(meta.tenant)
        policy = self._policies[part]
        policy.remove(meta.key, evicted=evicted)
        if part is not None and not len(policy) and not self._book.is_named(part):
            del self._policies[part]

    def victims(self, num_chunks: int, chunk_bytes: int, tenant: TenantId | None = None) -> list[ChunkKey]:
        """The chunks to let go for `num_chunks` of about `chunk_bytes`: this tenant's new ones, or (None) nobody's.
        Fewer where no more may go, or the others' are within their reserves.

        What would be beyond the tenant's quota takes the place of its own chunks, as far as they may go; what is
        within its reserve takes the place of others', as far as theirs may.
        """
        chosen: _Chosen = {}
        own = None if tenant is None else self.part_of(tenant)
        if own is not None:
            excess = self._book.num_excess(own, num_chunks, chunk_bytes)
            self._take(chosen, excess, [own], own)
            reserved = self._book.num_reserved(own, num_chunks - excess, chunk_bytes)
            self._take(chosen, reserved, [part for part in self._policies if part != own], own)
        self._take(chosen, num_chunks - len(chosen), self._policies, own)
        return list(chosen)

    def own_victims(self, num_chunks: int, tenant: TenantId) -> list[ChunkKey]:
        """Chunks of a tenant with limits that may go, at most so many."""
        chosen: _Chosen = {}
        self._take(chosen, num_chunks, [self.part_of(tenant)], tenant)
        return list(chosen)

    def __len__(self) -> int:
        """How many chunks the policies have in mind."""
        return sum(map(len, self._policies.values()))

    def _take(self, chosen: _Chosen, num_chunks: int, parts: Iterable[Part], own: Part) -> None:
        """Add at most so many victims to the chosen, from these policies, on behalf of a tenant of the policy `own`."""
        if num_chunks <= 0:
            return
        wanted = len(chosen) + num_chunks
        taken = Counter(chosen.values())
        spare = {part: self._spare_bytes(part, own, chosen) for part in parts if part in self._policies}
        by_spare = sorted((part for part, left in spare.items() if left > 0), key=spare.__getitem__, reverse=True)
        for start in range(0, len(by_spare), _COMPARED_AT_ONCE):
            some = by_spare[start : start + _COMPARED_AT_ONCE]
            offers = [
                [
                    (self._rank(key), key, part)
                    for key in self._named(part, taken[part] + num_chunks)
                    if key not in chosen
                ]
                for part in some
            ]
            for _, key, part in heapq.merge(*offers, key=_rank_of):
                if len(chosen) == wanted:
                    return
                num_bytes = self._bytes_of(key)
                if num_bytes <= spare[part]:
                    chosen[key] = part
                    spare[part] -= num_bytes

    def _spare_bytes(self, part: Part, own: Part, chosen: _Chosen) -> int:
        """What may be taken there, beside what is chosen already."""
        if part is None or part == own:
            return self._book.capacity_bytes
        return self._book.spare_bytes(part) - sum(self._bytes_of(key) for key, each in chosen.items() if each == part)

    def _named(self, part: Part, num_chunks: int) -> list[ChunkKey]:
        """The first so many that this policy would give up."""
        first = () if self._first_of is None else self._first_of(part)
        keys = dict.fromkeys(islice(first, num_chunks))
        if len(keys) < num_chunks:
            keys |= dict.fromkeys(self._policies[part].victims(num_chunks, self._is_evictable))
        return list(islice(keys, num_chunks))

    def _bytes_of(self, key: ChunkKey) -> int:
        meta = self._find(key)
        return 0 if meta is None else self._book.charge(meta)


def _rank_of(offer: tuple[tuple[int, ...], ChunkKey, Part]) -> tuple[int, ...]:
    return offer[0]
