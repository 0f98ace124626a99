"""One leadership, from winning the leader key to losing its lease, and what it may write.

Every write is guarded twice: the leader key must still be the one that this term created, and the stamp must be what
this term left there last. So a deposed leader can't write, and a transaction that is repeated, or that a stalled etcd
carries out long after its sender gave it up, changes nothing.
"""

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

import msgspec

from halfmoon.registry.etcd import CreatedAt, Delete, Etcd, Operation, Put, Range, StoreUnavailable, ValueIs, prefix_end
from halfmoon.registry.keys import Keys, all_under
from halfmoon.registry.members import LiveHeartbeat
from halfmoon.registry.orders import Change
from halfmoon.registry.policy import (
    DropNode,
    DropPlacement,
    NodeRecord,
    PutNode,
    PutPlacement,
    Step,
    coalesce,
)
from halfmoon.registry.values import Stamp, Values, read_stamp
from halfmoon.schemas.chunks import ChunkPlacement
from halfmoon.schemas.ids import NodeId, WorkerId

MAX_TXN_BYTES: Final = 1_000_000
"""etcd takes requests of up to 1.5 MiB."""
_RENEWALS_PER_TTL: Final = 4
_RENEWAL_RETRY_S: Final = 0.1
_SAFE_SHARE: Final = 0.8
"""Share of the lease's time after which an unrenewed term is over here, before it is over in etcd."""

_encode = msgspec.msgpack.encode


class Deposed(Exception):
    """This registry does not lead any more. Nothing was written."""


class OutOfStep(Exception):
    """etcd is not as this term left it last: a write whose answer was lost has been carried out. `load` again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderState:
    """What a leader starts from."""

    applied_seq: int
    nodes: dict[NodeId, NodeRecord]
    members: tuple[LiveHeartbeat, ...]


class Term:
    """Made by `Store.campaign`. 1. `load`; 2. `apply` and the rest, one at a time, while `hold` runs; 3. `resign`."""

    def __init__(
        self,
        etcd: Etcd,
        keys: Keys,
        values: Values,
        *,
        lease: int,
        leader_revision: int,
        ttl_s: int,
        renewed_s: float,
        max_txn_ops: int,
        write_timeout_s: float,
    ) -> None:
        self._etcd = etcd
        self._keys = keys
        self._values = values
        self._lease = lease
        self._leads = CreatedAt(keys.leader, leader_revision)
        self._ttl_s = ttl_s
        self._renewed_s = renewed_s
        self._max_txn_ops = max_txn_ops
        self._write_timeout_s = write_timeout_s
        self._stamp = Stamp(0, b"")

    @property
    def over_s(self) -> float:
        """Event loop time at which this term ends unless it is renewed."""
        return self._renewed_s + self._ttl_s * _SAFE_SHARE

    async def hold(self) -> None:
        """Renew the lease for as long as that works. Raises `Deposed` once it doesn't, always before etcd lets
        another registry lead."""
        loop = asyncio.get_running_loop()
        pause_s = self._ttl_s / _RENEWALS_PER_TTL
        while True:
            await asyncio.sleep(min(pause_s, max(0.0, self.over_s - loop.time())))
            left_s = self.over_s - loop.time()
            if left_s <= 0:
                raise Deposed("the lease could not be renewed in time")
            sent_s = loop.time()
            try:
                renewed = await self._etcd.keep_alive(self._lease, timeout_s=left_s)
            except StoreUnavailable:
                pause_s = _RENEWAL_RETRY_S
                continue
            if not renewed:
                raise Deposed("the lease has run out")
            self._renewed_s = sent_s
            pause_s = self._ttl_s / _RENEWALS_PER_TTL

    async def resign(self) -> None:
        """Let the next registry lead at once."""
        await self._etcd.revoke(self._lease, timeout_s=self._write_timeout_s)

    async def load(self) -> LeaderState:
        """Read where the last write, of whichever term, has left everything. Raises `Deposed`."""
        # The stamp must exist before it can be a guard.
        first = Put(self._keys.applied, _encode(Stamp(0, b"")))
        await self._etcd.transact([CreatedAt(self._keys.applied, 0)], [first], timeout_s=self._write_timeout_s)
        outcome = await self._etcd.transact(
            [self._leads],
            [Range(self._keys.applied), all_under(self._keys.nodes), all_under(self._keys.members)],
            timeout_s=self._write_timeout_s,
        )
        if not outcome.succeeded:
            raise Deposed("another registry leads")
        applied, nodes, members = outcome.ranges
        self._stamp = read_stamp(applied)
        return LeaderState(
            applied_seq=self._stamp.seq,
            nodes=self._values.nodes(nodes),
            members=tuple(self._values.heartbeats(members)),
        )

    async def apply(self, steps: Iterable[Step], seq: int | None = None) -> None:
        """Write the steps, and with the last of them that the stream is applied up to `seq` (None: as before).

        More steps than one transaction takes go in several: a leader that dies between them has not moved the
        sequence, so the next one repeats all of them. Raises `Deposed`, `OutOfStep`, `StoreUnavailable`; after the
        last, the same steps may be tried again.
        """
        operations = [self._operation(step) for step in coalesce(steps)]
        parts = _split(operations, self._max_txn_ops - 1)
        for number, part in enumerate(parts, start=1):
            reached = seq if seq is not None and number == len(parts) else self._stamp.seq
            await self._write(part, reached)

    async def record_members(self, heartbeats: Sequence[LiveHeartbeat], gone: Iterable[WorkerId], ttl_s: int) -> None:
        """List the members just heard for another `ttl_s`, and unlist those that are gone.

        All share one lease, which is never renewed: who isn't heard again goes with the lease of its last second.
        """
        lease = await self._etcd.grant(ttl_s, timeout_s=self._write_timeout_s) if heartbeats else 0
        listed = {heartbeat.worker for heartbeat in heartbeats}
        operations: list[Operation] = [Put(self._keys.member(hb.worker), _encode(hb), lease) for hb in heartbeats]
        operations += [Delete(self._keys.member(worker)) for worker in set(gone) - listed]
        for part in _split(operations, self._max_txn_ops):
            outcome = await self._etcd.transact([self._leads], part, timeout_s=self._write_timeout_s)
            if not outcome.succeeded:
                raise Deposed("another registry leads")

    async def write_orders(self, change: Change, before_seq: int) -> None:
        """Write one standing order; its number with the last part of it, so that no reader takes a part for all.

        Raises `Deposed`; `OutOfStep` where the last number isn't `before_seq`; `StoreUnavailable`: then it isn't known
        what has been written, and the book is to be read again.
        """
        operations: list[Operation] = [Put(self._keys.flush(order.seq), _encode(order)) for order in change.put_flushes]
        operations += [Delete(self._keys.flush(seq)) for seq in change.drop_flushes]
        operations += [Put(self._keys.pin(pin.key), _encode(pin)) for pin in change.put_pins]
        operations += [Delete(self._keys.pin(key)) for key in change.drop_pins]
        last = self._keys.last_order
        guard = ValueIs(last, _encode(before_seq)) if before_seq else CreatedAt(last, 0)
        parts = _split(operations, self._max_txn_ops - 1)
        parts[-1].append(Put(last, _encode(change.seq)))
        for part in parts:
            outcome = await self._etcd.transact(
                [self._leads, guard], part, [Range(self._keys.leader)], timeout_s=self._write_timeout_s
            )
            if not outcome.succeeded:
                leader = outcome.ranges[0]
                if not leader or leader[0].create_revision != self._leads.revision:
                    raise Deposed("another registry leads")
                raise OutOfStep

    async def page(self, cursor: bytes | None, limit: int) -> tuple[list[ChunkPlacement], bytes | None]:
        """Placements, also those that readers aren't told of, and where the next page begins."""
        start = self._keys.chunks if cursor is None else cursor + b"\0"
        read = Range(start, prefix_end(self._keys.chunks), limit=limit)
        outcome = await self._etcd.transact((), [read], timeout_s=self._write_timeout_s)
        found = outcome.ranges[0]
        return self._values.placements(found), found[-1].key if outcome.more[0] else None

    async def _write(self, operations: Sequence[Operation], seq: int) -> None:
        stamp = Stamp(seq, secrets.token_bytes(8))
        outcome = await self._etcd.transact(
            [self._leads, ValueIs(self._keys.applied, _encode(self._stamp))],
            [*operations, Put(self._keys.applied, _encode(stamp))],
            [Range(self._keys.leader), Range(self._keys.applied)],
            timeout_s=self._write_timeout_s,
        )
        if not outcome.succeeded:
            leader, applied = outcome.ranges
            if not leader or leader[0].create_revision != self._leads.revision:
                raise Deposed("another registry leads")
            if read_stamp(applied) != stamp:
                raise OutOfStep
        self._stamp = stamp

    def _operation(self, step: Step) -> Put | Delete:
        match step:
            case PutPlacement(placement):
                return Put(self._keys.placement(placement.chunk.key, placement.node), _encode(placement))
            case DropPlacement(key, node):
                return Delete(self._keys.placement(key, node))
            case PutNode(record):
                return Put(self._keys.node(record.node), _encode(record))
            case DropNode(node):
                return Delete(self._keys.node(node))
            case _ as unreachable:
                assert_never(unreachable)


def _split(operations: Sequence[Operation], max_ops: int) -> list[list[Operation]]:
    """In order, by count and by size; at least one part, which may be empty."""
    parts: list[list[Operation]] = [[]]
    num_bytes = 0
    for operation in operations:
        size = len(operation.key) + (len(operation.value) if isinstance(operation, Put) else 0)
        if parts[-1] and (len(parts[-1]) >= max_ops or num_bytes + size > MAX_TXN_BYTES):
            parts.append([])
            num_bytes = 0
        parts[-1].append(operation)
        num_bytes += size
    return parts
