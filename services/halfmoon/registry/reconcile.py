"""Makes what etcd says of a node agree with the node's own inventory.

A difference arises where the stream was cut (`StreamGap`), where a node was taken for lost, forgotten, and comes back
in the same epoch (its chunks are not announced again), or by a defect. The node is asked to say again, in the stream,
what is true of the chunks in question: so etcd and every conductor take the correction in as they take in all else, in
the node's own order. Nothing is written here.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import structlog

from halfmoon.bus.endpoint import call
from halfmoon.bus.errors import BusError
from halfmoon.bus.protocol import Bus
from halfmoon.registry.etcd import StoreUnavailable
from halfmoon.registry.policy import NodeRecord
from halfmoon.registry.term import Term
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import Tier
from halfmoon.schemas.ids import ChunkKey, NodeId
from halfmoon.schemas.kv_tier import Done, Inventory, InventoryPage, Retell

OnDifference: TypeAlias = Callable[[int, int, int], None]
PAGE_KEYS: Final = 4096
PAGE_PLACEMENTS: Final = 1000
NODES_AT_ONCE: Final = 8
"""Nodes compared in one pass over etcd: bounds what is remembered of it."""
CALL_TIMEOUT_S: Final = 5.0
PAGE_PAUSE_S: Final = 0.005
LOOK_EVERY_S: Final = 0.25
RETRY_S: Final = 2.0


class Reconciler:
    """One term's. `run` is its one task; `see` is told who is there."""

    def __init__(
        self,
        bus: Bus,
        term: Term,
        *,
        every_s: float,
        on_difference: OnDifference,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        """`every_s`: how long an agreement is relied on before the node is compared again. `on_difference` hears how
        many chunks etcd missed, how many the node has no more, and how many are in another tier than etcd says."""
        self._bus = bus
        self._term = term
        self._every_s = every_s
        self._log = log
        self._present: dict[NodeId, int] = {}
        self._agreed: dict[NodeId, tuple[int, float]] = {}
        """Node → the epoch in which it was compared, and until when (event loop time) that will do."""
        self._num_doubts = 0
        """Rises whenever what is being compared may be out of date."""
        self._on_difference = on_difference

    def see(self, present: Mapping[NodeId, int], records: Mapping[NodeId, NodeRecord]) -> None:
        """Who is there, with their epochs, and the records as they are before they are judged by that."""
        lost = {node for node, record in records.items() if record.lost_ns is not None}
        self._present = dict(present)
        for node, (epoch, _) in list(self._agreed.items()):
            if present.get(node) != epoch or node in lost:
                del self._agreed[node]
        if lost & present.keys():
            self._num_doubts += 1

    def distrust_all(self) -> None:
        """Events were lost: every node is compared anew."""
        self._agreed.clear()
        self._num_doubts += 1

    async def run(self) -> None:
        """Compare whoever is due, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            due = [node for node in self._present if self._agreed.get(node, (0, 0.0))[1] <= loop.time()]
            if due:
                await self._compare({node: self._present[node] for node in due[:NODES_AT_ONCE]})

    async def _compare(self, nodes: Mapping[NodeId, int]) -> None:
        """Placements are read first: what is announced meanwhile is at worst told twice. What a node has promised to
        retell counts as settled: it forgets nothing that the stream hasn't stored."""
        loop = asyncio.get_running_loop()
        num_doubts = self._num_doubts
        try:
            written = await self._written(nodes)
        except StoreUnavailable as error:
            self._log.debug("inventories not compared", error=str(error))
            await asyncio.sleep(RETRY_S)
            return
        for node, epoch in nodes.items():
            try:
                settled = await self._settle(node, epoch, written[node])
            except BusError as error:
                self._log.debug("no inventory", node=node, error=str(error))
                settled = False
            if self._num_doubts == num_doubts and self._present.get(node) == epoch:
                self._agreed[node] = (epoch, loop.time() + (self._every_s if settled else RETRY_S))

    async def _written(self, nodes: Mapping[NodeId, int]) -> dict[NodeId, dict[ChunkKey, Tier]]:
        """What etcd says that these nodes hold in their present epochs, and where."""
        found: dict[NodeId, dict[ChunkKey, Tier]] = {node: {} for node in nodes}
        cursor: bytes | None = None
        while True:
            placements, cursor = await self._term.page(cursor, PAGE_PLACEMENTS)
            for placement in placements:
                if nodes.get(placement.node) == placement.epoch:
                    found[placement.node][placement.chunk.key] = placement.chunk.tier
            if cursor is None:
                return found
            await asyncio.sleep(PAGE_PAUSE_S)

    async def _settle(self, node: NodeId, epoch: int, written: dict[ChunkKey, Tier]) -> bool:
        """Have the node retell what differs. False where another life of it answers."""
        subject = subjects.kv_tier(node)
        missing: list[ChunkKey] = []
        moved: list[ChunkKey] = []
        after: ChunkKey | None = None
        while True:
            ask = Inventory(after=after, limit=PAGE_KEYS)
            page = await call(self._bus, f"{subject}.inventory", ask, InventoryPage, timeout_s=CALL_TIMEOUT_S)
            if page.epoch != epoch:
                return False
            below = None if page.on_ssd is None else frozenset(page.on_ssd)
            for key in page.keys:
                believed = written.pop(key, None)
                if believed is None:
                    missing.append(key)
                elif below is not None and (believed is Tier.SSD) != (key in below):
                    moved.append(key)
            if len(page.keys) < PAGE_KEYS:
                break
            after = page.keys[-1]
        stale = sorted(written)
        differing = missing + stale + moved
        for start in range(0, len(differing), PAGE_KEYS):
            retell = Retell(keys=tuple(differing[start : start + PAGE_KEYS]))
            await call(self._bus, f"{subject}.retell", retell, Done, timeout_s=CALL_TIMEOUT_S)
        if differing:
            counts = len(missing), len(stale), len(moved)
            self._on_difference(*counts)
            kinds = dict(zip(("missing", "stale", "wrong_tier"), counts, strict=True))
            self._log.info("a node's inventory differs from etcd", node=node, **kinds)
        return True
