"""What tenants may hold of one tier, and what they do hold. Pure.

    0 ──────────── reserve ──────────────────────── quota ───────── the tier's bytes
      nobody else      others may evict what lies      not cached: a chunk beyond it is a working
      may evict        above the reserve               copy, which goes with its request

A chunk counts for the tenant that computed it, also where others read it (tenants that share a salt).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from halfmoon.schemas.chunks import ChunkMeta, Tier
from halfmoon.schemas.ids import ModelName, TenantId

EVERYBODY = "*"
"""The name under which quotas are set for all tenants that have no entry of their own."""

_Share = Annotated[float, Meta(ge=0, le=1)]
_Bytes = Annotated[int, Meta(ge=0)]


class TierQuota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one tier of one node. Where bytes and a share are set, the smaller maximum and the larger reserve count."""

    max_bytes: _Bytes | None = None
    max_share: _Share | None = None
    reserve_bytes: _Bytes = 0
    reserve_share: _Share = 0.0

    def most(self, capacity_bytes: int) -> int | None:
        """The quota in bytes; None where there is none."""
        shares = () if self.max_share is None else (int(self.max_share * capacity_bytes),)
        fixed = () if self.max_bytes is None else (self.max_bytes,)
        return min((*shares, *fixed), default=None)

    def reserve(self, capacity_bytes: int) -> int:
        """Bytes that others leave alone."""
        return max(self.reserve_bytes, int(self.reserve_share * capacity_bytes))


class TenantQuotas(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one tenant may hold on each node."""

    dram: TierQuota = TierQuota()
    ssd: TierQuota = TierQuota()

    def of(self, tier: Tier) -> TierQuota:
        """Raises KeyError for a tier without quotas."""
        return {Tier.DRAM: self.dram, Tier.SSD: self.ssd}[tier]


Quotas = Mapping[str, TenantQuotas]
"""By tenant, or `*`."""


def check_quotas(quotas: Quotas, tier: Tier, capacity_bytes: int) -> None:
    """Raises ValueError for quotas that can't be kept on a tier of this size, saying which and what to do."""
    total_bytes = 0
    for tenant, each in quotas.items():
        quota = each.of(tier)
        reserve_bytes, most_bytes = quota.reserve(capacity_bytes), quota.most(capacity_bytes)
        where = f"tenants: {tenant!r}: {tier.value}"
        if not tenant:
            raise ValueError("tenants: a tenant's name is empty: name it, or use '*' for all others")
        if tenant == EVERYBODY and (quota.reserve_bytes or quota.reserve_share):
            raise ValueError(f"{where}: a reserve for any number of tenants can't be kept: reserve for named ones only")
        if most_bytes is not None and reserve_bytes > most_bytes:
            raise ValueError(
                f"{where}: a reserve of {reserve_bytes:,} bytes could never be filled with a maximum of "
                f"{most_bytes:,}: lower the one or raise the other"
            )
        total_bytes += reserve_bytes
    if total_bytes > capacity_bytes:
        raise ValueError(
            f"tenants: the reserves of {tier.value} add up to {total_bytes:,} bytes of {capacity_bytes:,}: together "
            "they may take the whole tier at most; leave some of it free, since requests in flight need room too"
        )


@dataclass(slots=True)
class Held:
    """Registered chunks of one tenant and model in one tier."""

    num_chunks: int = 0
    num_bytes: int = 0


class TierBook:
    """Who holds how much of one tier. Whoever keeps the tier calls `admit` before a chunk is registered in it, and
    `discharge` when it no longer is: so no tenant is ever above its quota."""

    def __init__(self, tier: Tier, capacity_bytes: int, quotas: Quotas, *, chunk_bytes: int | None = None) -> None:
        """`chunk_bytes`: what any chunk takes (a slot of the arena). None: its own bytes.

        Raises ValueError as `check_quotas`.
        """
        check_quotas(quotas, tier, capacity_bytes)
        self.tier = tier
        self.capacity_bytes = capacity_bytes
        self._chunk_bytes = chunk_bytes
        self._quotas = {TenantId(tenant): each.of(tier) for tenant, each in quotas.items()}
        self._default = self._quotas.pop(TenantId(EVERYBODY), TierQuota())
        self._bytes: dict[TenantId, int] = {}
        """No zeros."""
        self._held: dict[tuple[TenantId, ModelName], Held] = {}
        """No empty ones."""

    def is_apart(self, tenant: TenantId) -> bool:
        """Whether this tenant has limits, so that its chunks are to be told from the others'."""
        return tenant in self._quotas or self._default != TierQuota()

    def is_named(self, tenant: TenantId) -> bool:
        return tenant in self._quotas

    @property
    def has_limits(self) -> bool:
        return bool(self._quotas) or self._default != TierQuota()

    def used_bytes(self, tenant: TenantId) -> int:
        return self._bytes.get(tenant, 0)

    def held(self) -> Iterator[tuple[TenantId, ModelName, Held]]:
        return ((tenant, model, held) for (tenant, model), held in list(self._held.items()))

    def left_bytes(self, tenant: TenantId) -> int | None:
        """What the tenant may still have registered; None where it has no quota."""
        most_bytes = self._quota(tenant).most(self.capacity_bytes)
        return None if most_bytes is None else most_bytes - self.used_bytes(tenant)

    def num_excess(self, tenant: TenantId, num_chunks: int, chunk_bytes: int) -> int:
        """Of so many new chunks, how many are beyond the tenant's quota."""
        most_bytes = self._quota(tenant).most(self.capacity_bytes)
        if most_bytes is None:
            return 0
        return max(0, num_chunks - max(0, most_bytes - self.used_bytes(tenant)) // chunk_bytes)

    def num_reserved(self, tenant: TenantId, num_chunks: int, chunk_bytes: int) -> int:
        """Of so many new chunks, how many lie within the tenant's reserve."""
        left_bytes = self._quota(tenant).reserve(self.capacity_bytes) - self.used_bytes(tenant)
        return min(num_chunks, max(0, left_bytes) // chunk_bytes)

    def spare_bytes(self, tenant: TenantId) -> int:
        """What others may evict of this tenant's: all that is above its reserve."""
        return max(0, self.used_bytes(tenant) - self._quota(tenant).reserve(self.capacity_bytes))

    def admit(self, meta: ChunkMeta) -> bool:
        """Count a chunk that is about to be registered; False, and nothing changes, where that exceeds the quota."""
        num_bytes = self.charge(meta)
        used_bytes = self.used_bytes(meta.tenant) + num_bytes
        most_bytes = self._quota(meta.tenant).most(self.capacity_bytes)
        if most_bytes is not None and used_bytes > most_bytes:
            return False
        self._bytes[meta.tenant] = used_bytes
        held = self._held.setdefault((meta.tenant, meta.model), Held())
        held.num_chunks += 1
        held.num_bytes += num_bytes
        return True

    def discharge(self, meta: ChunkMeta) -> None:
        """A chunk that was admitted is registered no more. Raises KeyError where it wasn't."""
        num_bytes = self.charge(meta)
        self._bytes[meta.tenant] -= num_bytes
        if not self._bytes[meta.tenant]:
            del self._bytes[meta.tenant]
        held = self._held[meta.tenant, meta.model]
        held.num_chunks -= 1
        held.num_bytes -= num_bytes
        if not held.num_chunks:
            del self._held[meta.tenant, meta.model]

    def check(self, metas: Iterable[ChunkMeta]) -> None:
        """Raises AssertionError where these aren't the chunks that are counted, or a tenant is above its quota."""
        held: Counter[tuple[TenantId, ModelName]] = Counter()
        used_bytes: Counter[TenantId] = Counter()
        for meta in metas:
            held[meta.tenant, meta.model] += 1
            used_bytes[meta.tenant] += self.charge(meta)
        assert held == {key: each.num_chunks for key, each in self._held.items()}, (held, self._held)
        assert used_bytes == self._bytes, (used_bytes, self._bytes)
        for tenant, num_bytes in used_bytes.items():
            most_bytes = self._quota(tenant).most(self.capacity_bytes)
            assert most_bytes is None or num_bytes <= most_bytes, (tenant, num_bytes, most_bytes)

    def charge(self, meta: ChunkMeta) -> int:
        """Bytes that this chunk takes of the tier."""
        return self._chunk_bytes if self._chunk_bytes is not None else meta.num_bytes

    def _quota(self, tenant: TenantId) -> TierQuota:
        return self._quotas.get(tenant, self._default)
