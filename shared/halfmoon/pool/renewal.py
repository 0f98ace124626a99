"""Keeping leases alive until they are given back: one task, which renews each at a third of its length."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from halfmoon.bus.errors import BusError
from halfmoon.schemas.ids import LeaseId
from halfmoon.schemas.kv_tier import Renewed
from halfmoon.tasks import ended

Renew = Callable[[tuple[LeaseId, ...], float], Awaitable[Renewed]]
"""Asks the pool for so many seconds more. Raises `BusError`."""

_RETRY_S = 0.5


@dataclass(slots=True)
class _Kept:
    lease_s: float
    renew_at: float
    """In the loop's time."""


class Renewals:
    """Leases on one pool. The task starts with the first of them, and `close` ends it."""

    def __init__(self, renew: Renew, name: str) -> None:
        """`name`: of the task, for a person who debugs."""
        self._ask = renew
        self._name = name
        self._kept: dict[LeaseId, _Kept] = {}
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, lease_id: LeaseId) -> bool:
        """False once it was dropped, or found to have expired."""
        return lease_id in self._kept

    def keep(self, lease_id: LeaseId, lease_s: float) -> None:
        """Renew this lease from now on, by `lease_s` each time. Nothing is kept after `close`."""
        if self._closed:
            return
        self._kept[lease_id] = _Kept(lease_s, asyncio.get_running_loop().time() + lease_s / 3)
        self._more.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=self._name)

    def drop(self, lease_id: LeaseId) -> None:
        """Renew it no more. Unknown ones are ignored."""
        self._kept.pop(lease_id, None)

    async def close(self) -> tuple[LeaseId, ...]:
        """Renew nothing any more; what was still kept, for the caller to give back. Idempotent."""
        self._closed = True
        if self._task is not None:
            await ended(self._task)
            self._task = None
        left = tuple(self._kept)
        self._kept.clear()
        return left

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._more.clear()
            if not self._kept:
                await self._more.wait()
                continue
            wait_s = min(kept.renew_at for kept in self._kept.values()) - loop.time()
            if wait_s > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._more.wait()
                continue
            due: dict[float, list[LeaseId]] = {}
            for lease_id, kept in self._kept.items():
                if kept.renew_at <= loop.time():
                    due.setdefault(kept.lease_s, []).append(lease_id)
            for lease_s, lease_ids in due.items():
                await self._renew(lease_s, lease_ids)

    async def _renew(self, lease_s: float, lease_ids: list[LeaseId]) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            renewed = await self._ask(tuple(lease_ids), lease_s)
        except BusError:
            again = min(_RETRY_S, lease_s / 6)  # The lease may still live: nothing is lost by asking again.
            expired: tuple[LeaseId, ...] = ()
            started = loop.time()
        else:
            again = lease_s / 3
            expired = renewed.expired
        for lease_id in expired:
            self._kept.pop(lease_id, None)
        for lease_id in lease_ids:
            if (kept := self._kept.get(lease_id)) is not None:
                kept.renew_at = started + again
