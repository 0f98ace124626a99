"""What any registry may do with etcd at any time: answer, and stand for leader. What the leader writes: `term.py`."""

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from halfmoon.registry.etcd import CreatedAt, Etcd, Put, Range, StoreRefused, StoreUnavailable, prefix_end
from halfmoon.registry.keys import Keys, all_under, reads_of_orders
from halfmoon.registry.orders import OrderBook
from halfmoon.registry.policy import visible
from halfmoon.registry.term import Term
from halfmoon.registry.values import Values, read_stamp
from halfmoon.schemas.chunks import ChunkPlacement
from halfmoon.schemas.ids import ChunkKey, NodeId, WorkerId
from halfmoon.schemas.registry import MemberList, SnapshotPage

MAX_PLACEMENTS_PER_KEY: Final = 16
"""More copies of one chunk than this are not told of: a lookup's answer has to fit into one message."""
MAX_PAGE_PLACEMENTS: Final = 5000
_CHECK_PAUSE_S: Final = 0.2
_CHECK_ATTEMPT_S: Final = 2.0


class Store:
    """The registry's data. Every call has a deadline, and raises `StoreUnavailable` when it is over."""

    def __init__(self, etcd: Etcd, *, prefix: str, max_txn_ops: int, write_timeout_s: float) -> None:
        self._etcd = etcd
        self._keys = Keys(prefix)
        self._max_txn_ops = max_txn_ops
        self._write_timeout_s = write_timeout_s
        self.values = Values()

    @property
    def endpoints(self) -> tuple[str, ...]:
        return self._etcd.endpoints

    async def check(self, timeout_s: float) -> None:
        """Return once etcd answers, and takes transactions as large as ours. Raises `StoreUnavailable`."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        probe = [Range(self._keys.applied)] * self._max_txn_ops
        while True:
            attempt_s = max(0.1, min(_CHECK_ATTEMPT_S, deadline_s - loop.time()))
            try:
                await self._etcd.transact((), probe, timeout_s=attempt_s)
            except StoreRefused:
                raise
            except StoreUnavailable:
                if loop.time() + _CHECK_PAUSE_S >= deadline_s:
                    raise
                await asyncio.sleep(_CHECK_PAUSE_S)
            else:
                return

    async def close(self) -> None:
        await self._etcd.close()

    async def lookup(self, keys: Sequence[ChunkKey], timeout_s: float) -> tuple[tuple[ChunkPlacement, ...], ...]:
        """The visible placements of each key, in order. One round trip: what one transaction can't hold goes in
        several at the same time."""
        size = self._max_txn_ops - 1
        parts = [keys[start : start + size] for start in range(0, len(keys), size)]
        found = await asyncio.gather(*(self._lookup_part(part, timeout_s) for part in parts))
        return tuple(placements for part in found for placements in part)

    async def _lookup_part(self, keys: Sequence[ChunkKey], timeout_s: float) -> list[tuple[ChunkPlacement, ...]]:
        reads = [all_under(self._keys.nodes), *(all_under(self._keys.chunk(key)) for key in keys)]
        outcome = await self._etcd.transact((), reads, timeout_s=timeout_s)
        nodes = self.values.nodes(outcome.ranges[0])
        return [
            tuple(each for each in self.values.placements(found) if visible(each, nodes))[:MAX_PLACEMENTS_PER_KEY]
            for found in outcome.ranges[1:]
        ]

    async def snapshot(self, cursor: bytes | None, revision: int | None, limit: int, timeout_s: float) -> SnapshotPage:
        """One page of all visible placements, and the stream sequence that they include.

        Later pages are read at the first one's revision. Raises `RevisionGone` where etcd has dropped it.
        """
        chunks = self._keys.chunks
        start = chunks if cursor is None else max(cursor + b"\0", chunks)
        at = revision or 0
        outcome = await self._etcd.transact(
            (),
            [
                Range(start, prefix_end(chunks), limit=max(1, min(limit, MAX_PAGE_PLACEMENTS)), revision=at),
                Range(self._keys.nodes, prefix_end(self._keys.nodes), revision=at),
                Range(self._keys.applied, revision=at),
            ],
            timeout_s=timeout_s,
        )
        page, node_values, applied = outcome.ranges
        nodes = self.values.nodes(node_values)
        return SnapshotPage(
            revision=revision or outcome.revision,
            stream_seq=read_stamp(applied).seq,
            placements=tuple(each for each in self.values.placements(page) if visible(each, nodes)),
            cursor=page[-1].key if outcome.more[0] else None,
            epochs={node: record.epoch for node, record in nodes.items()} if cursor is None else {},
            lost=tuple(sorted(node for node in nodes if nodes[node].lost_ns is not None)) if cursor is None else (),
        )

    async def members(self, timeout_s: float) -> MemberList:
        outcome = await self._etcd.transact((), [all_under(self._keys.members)], timeout_s=timeout_s)
        return MemberList(members=tuple(self.values.heartbeats(outcome.ranges[0])))

    async def orders(self, timeout_s: float) -> OrderBook:
        """What is pinned, and what was flushed."""
        outcome = await self._etcd.transact((), reads_of_orders(self._keys), timeout_s=timeout_s)
        return self.values.orders(*outcome.ranges)

    async def nodes(self, timeout_s: float) -> frozenset[NodeId]:
        """All that have a record: those that are there, and those that went not long ago."""
        outcome = await self._etcd.transact((), [all_under(self._keys.nodes)], timeout_s=timeout_s)
        return frozenset(self.values.nodes(outcome.ranges[0]))

    async def leader(self, timeout_s: float) -> WorkerId | None:
        """Who leads now."""
        outcome = await self._etcd.transact((), [Range(self._keys.leader)], timeout_s=timeout_s)
        found = outcome.ranges[0]
        return msgspec.msgpack.decode(found[0].value, type=tuple[WorkerId, int])[0] if found else None

    async def campaign(self, worker: WorkerId, ttl_s: int) -> Term | None:
        """Become the leader where there is none; None where there is one."""
        loop = asyncio.get_running_loop()
        timeout_s = self._write_timeout_s
        if await self.leader(timeout_s) is not None:
            return None
        granted_s = loop.time()
        lease = await self._etcd.grant(ttl_s, timeout_s=timeout_s)
        # The lease in the value makes our own key known to us where the answer to the first attempt was lost.
        value = msgspec.msgpack.encode((worker, lease))
        outcome = await self._etcd.transact(
            [CreatedAt(self._keys.leader, 0)],
            [Put(self._keys.leader, value, lease), Range(self._keys.leader)],
            [Range(self._keys.leader)],
            timeout_s=timeout_s,
        )
        key = outcome.ranges[0][0]
        if key.value != value:
            await self._etcd.revoke(lease, timeout_s=timeout_s)
            return None
        return Term(
            self._etcd,
            self._keys,
            self.values,
            lease=lease,
            leader_revision=key.create_revision,
            ttl_s=ttl_s,
            renewed_s=granted_s,
            max_txn_ops=self._max_txn_ops,
            write_timeout_s=timeout_s,
        )
