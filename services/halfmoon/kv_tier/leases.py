"""The book of leases: who holds which slots, until when. Pure; times are passed in."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from halfmoon.schemas.ids import LeaseId, RequestId, WorkerId


@dataclass(slots=True)
class Lease:
    """One holder's claim. It holds each slot at most once."""

    lease_id: LeaseId
    holder: WorkerId
    request_id: RequestId
    expires_ns: int
    slots: dict[int, int] = field(default_factory=dict)
    """Slot number to the generation that is held."""


class LeaseBook:
    """Leases by id, and the order in which they expire."""

    def __init__(self, publish: Callable[[LeaseId, int | None], None] | None = None) -> None:
        """`publish(lease, expiry)` is told each lease's expiry, whenever it is set, and None when the lease goes."""
        self._publish = publish
        self._leases: dict[LeaseId, Lease] = {}
        self._expiries: list[tuple[int, LeaseId]] = []
        """A heap with one entry or more per lease: an entry counts only while it is the lease's own expiry."""

    def __len__(self) -> int:
        return len(self._leases)

    def open(self, lease_id: LeaseId, holder: WorkerId, request_id: RequestId, expires_ns: int) -> Lease:
        """A new lease on nothing. Raises ValueError where the id is taken."""
        if lease_id in self._leases:
            raise ValueError(f"lease {lease_id} exists already")
        lease = Lease(lease_id, holder, request_id, expires_ns)
        self._leases[lease_id] = lease
        heapq.heappush(self._expiries, (expires_ns, lease_id))
        self._announce(lease_id, expires_ns)
        return lease

    def get(self, lease_id: LeaseId) -> Lease | None:
        return self._leases.get(lease_id)

    def renew(self, lease: Lease, expires_ns: int) -> None:
        """Set the expiry, later or earlier."""
        lease.expires_ns = expires_ns
        heapq.heappush(self._expiries, (expires_ns, lease.lease_id))
        self._announce(lease.lease_id, expires_ns)
        if len(self._expiries) > 8 * len(self._leases) + 64:
            self._expiries = [(each.expires_ns, each.lease_id) for each in self._leases.values()]
            heapq.heapify(self._expiries)

    def close(self, lease_id: LeaseId) -> Lease | None:
        """Take the lease out of the book; None where it isn't in it."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self._announce(lease_id, None)
        return lease

    def expired(self, now_ns: int) -> list[Lease]:
        """Take out and return every lease whose time has come."""
        gone: list[Lease] = []
        while (expiry := self.next_expiry_ns()) is not None and expiry <= now_ns:
            lease = self._leases.pop(heapq.heappop(self._expiries)[1])
            self._announce(lease.lease_id, None)
            gone.append(lease)
        return gone

    def next_expiry_ns(self) -> int | None:
        """When the next lease expires."""
        while self._expiries:
            expires_ns, lease_id = self._expiries[0]
            lease = self._leases.get(lease_id)
            if lease is not None and lease.expires_ns == expires_ns:
                return expires_ns
            heapq.heappop(self._expiries)
        return None

    def request_ids(self) -> frozenset[RequestId]:
        """Of all that hold leases."""
        return frozenset(lease.request_id for lease in self._leases.values())

    def holdings(self) -> dict[int, list[int]]:
        """For each held slot, the generations held: one per lease."""
        held: dict[int, list[int]] = {}
        for lease in self._leases.values():
            for slot, generation in lease.slots.items():
                held.setdefault(slot, []).append(generation)
        return held

    def _announce(self, lease_id: LeaseId, expires_ns: int | None) -> None:
        if self._publish is not None:
            self._publish(lease_id, expires_ns)
