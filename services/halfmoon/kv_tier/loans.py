"""Leases at other nodes of this host, held on behalf of readers here who read those nodes' slots in place."""

import asyncio
from collections.abc import Callable, Iterable

from halfmoon.kv_tier.peers import Peers
from halfmoon.pool.renewal import Renewals
from halfmoon.schemas.ids import LeaseId, NodeId
from halfmoon.schemas.kv_tier import Renew, Renewed

_RENEW_TIMEOUT_S = 2.0


class Loans:
    """Each loan lives as long as one of the readers' own leases does, and is renewed meanwhile.

    Should the loan expire all the same (its node hung, or couldn't be asked), its slots may be freed, and the reader
    sees that by their generation, as it does with a lease of its own.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._readers: dict[tuple[NodeId, LeaseId], set[LeaseId]] = {}
        self._renewals: dict[NodeId, Renewals] = {}

    def __len__(self) -> int:
        return len(self._readers)

    def borrow(self, node: NodeId, lease_id: LeaseId, lease_s: float, readers: Iterable[LeaseId]) -> None:
        """Keep this lease at `node` while any of these leases here lives."""
        held = self._readers.setdefault((node, lease_id), set())
        held.update(readers)
        if node not in self._renewals:
            self._renewals[node] = self._renewals_at(node)
        self._renewals[node].keep(lease_id, lease_s)

    def settle(self, is_live: Callable[[LeaseId], bool]) -> list[tuple[NodeId, LeaseId]]:
        """Those that nobody here needs any more: for the caller to give back."""
        settled = [loan for loan, readers in self._readers.items() if not any(is_live(each) for each in readers)]
        for node, lease_id in settled:
            del self._readers[node, lease_id]
            self._renewals[node].drop(lease_id)
        return settled

    async def close(self) -> list[tuple[NodeId, LeaseId]]:
        """Renew nothing any more; what is still held, for the caller to give back."""
        await asyncio.gather(*(renewals.close() for renewals in self._renewals.values()))
        left = list(self._readers)
        self._readers.clear()
        return left

    def _renewals_at(self, node: NodeId) -> Renewals:
        async def renew(lease_ids: tuple[LeaseId, ...], lease_s: float) -> Renewed:
            return await self._peers.renew(node, Renew(lease_ids=lease_ids, lease_s=lease_s), _RENEW_TIMEOUT_S)

        return Renewals(renew, f"kv-tier loans of {node}")
