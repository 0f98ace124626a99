"""What one request holds in its node's pool."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import TypeVar

from halfmoon.pool.client import PoolClient
from halfmoon.schemas.ids import LeaseId, ModelName, RequestId, TenantId
from halfmoon.schemas.kv_tier import Acquired, Committed, NewChunk, Reserved, WantedChunk, WrittenChunk
from halfmoon.worker.makers import Makers

Granted = TypeVar("Granted", Acquired, Reserved)

SETTLE_TIMEOUT_S = 5.0
"""How long `release_all` waits for answers that are still on their way. What comes later is renewed by nobody."""


class LeaseSet:
    """Every lease that one request asked for; none is forgotten, also where the asker was cancelled meanwhile.

    To be used as `async with`: at the end all of them are released.
    """

    def __init__(
        self,
        pool: PoolClient,
        request_id: RequestId,
        *,
        tenant: TenantId,
        model: ModelName,
        root: bytes,
        makers: Makers,
        lease_s: float,
        deadline_ns: int,
        timeout_s: float,
    ) -> None:
        """`makers` is told whose KV the engine may hold for this request, under this root. `timeout_s` bounds each
        question to the pool, as `deadline_ns` bounds them all."""
        self._pool = pool
        self._request_id = request_id
        self._tenant = tenant
        self._model = model
        self._root = root
        self._makers = makers
        self._lease_s = lease_s
        self._deadline_ns = deadline_ns
        self._timeout_s = timeout_s
        self._held: set[LeaseId] = set()
        self._asking: set[asyncio.Task[Acquired] | asyncio.Task[Reserved]] = set()

    @property
    def pool(self) -> PoolClient:
        return self._pool

    async def __aenter__(self) -> "LeaseSet":
        self._makers.note(self._root, self._tenant, self._model)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release_all()

    async def acquire(self, chunks: Sequence[WantedChunk], *, keep: bool) -> Acquired:
        """Raises `BusError` (a refusal is a `RemoteError`)."""
        acquired = await self._ask(
            self._pool.acquire(
                self._request_id,
                chunks,
                lease_s=self._lease_s,
                keep=keep,
                deadline_ns=self._bound_ns(),
                tenant=self._tenant,
                model=self._model,
            )
        )
        for chunk in acquired.chunks:
            if chunk.meta is not None:
                self._makers.note(self._root, chunk.meta.tenant, chunk.meta.model)
        return acquired

    async def reserve(self, chunks: Sequence[NewChunk]) -> Reserved:
        """Raises `BusError`."""
        return await self._ask(
            self._pool.reserve(
                self._request_id,
                chunks,
                lease_s=self._lease_s,
                deadline_ns=self._bound_ns(),
                tenant=self._tenant,
            )
        )

    async def commit(self, lease_id: LeaseId, chunks: Sequence[WrittenChunk]) -> Committed:
        """Raises `BusError`: a `RemoteError` with code `stale` where the lease has expired."""
        return await self._pool.commit(lease_id, chunks)

    async def release(self, lease_id: LeaseId) -> None:
        self._held.discard(lease_id)
        await self._pool.release(lease_id)

    async def release_all(self) -> None:
        """Idempotent. What the pool can't be told now expires by itself."""
        if self._asking:
            _, late = await asyncio.wait(set(self._asking), timeout=SETTLE_TIMEOUT_S)
            for task in late:
                task.cancel()
        held, self._held = tuple(self._held), set()
        if held:
            await self._pool.release(*held)

    async def _ask(self, call: Coroutine[None, None, Granted]) -> Granted:
        task: asyncio.Task[Granted] = asyncio.create_task(call)
        self._asking.add(task)
        task.add_done_callback(self._answered)
        return await asyncio.shield(task)

    def _answered(self, task: "asyncio.Task[Acquired] | asyncio.Task[Reserved]") -> None:
        self._asking.discard(task)
        if not task.cancelled() and task.exception() is None:
            self._held.add(task.result().lease_id)

    def _bound_ns(self) -> int:
        return min(self._deadline_ns, time.time_ns() + int(self._timeout_s * 1e9))
