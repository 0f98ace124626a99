"""Which prefixes get one more copy, and where: measured demand to orders. Pure; it is told the time.

prompts placed ─ Demand ─▶ hot runs (leading chunks that deserve more copies) ─ orders ─▶ what nodes are told to bring

A replica continues what its node holds from the first chunk on, since a chunk without its prefix is of no use.

No storms: a run gets at most one order per pass, a node at most so many bytes a second, whatever it lacks. So what a
node that has just come up empty gets is spread over time, and meanwhile the others are given copies too.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from halfmoon.scheduling.copies import CopyLimits, Labels, lot, nearness, wanted_copies
from halfmoon.scheduling.demand import Demand
from halfmoon.schemas.ids import ChunkKey, NodeId

MAX_RUNS: Final = 256
"""Hot runs that are looked at in one pass; more are seen again when they are used again."""
MAX_ORDER_CHUNKS: Final = 64
MAX_ORDERS: Final = 32
"""In one pass."""
PENDING_S: Final = 10.0
"""So long a copy that was ordered counts as one that is there. Then it has been announced, or won't come."""
_FULL: Final = 0.9
"""A pool of which this share is in use at this moment has no room for what nobody waits for."""
_READY_SHARE: Final = 8
"""A replica may take free slots, and one in so many of those that hold chunks which nobody reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """What one node's pool has room for, as its last heartbeat said."""

    node: NodeId
    num_slots: int
    num_free: int
    num_ready: int
    """Slots with chunks that nobody reads now."""
    num_transfers: int = 0
    slot_bytes: int | None = None
    """Of a chunk, at most. None: not known."""

    def can_hold(self, run: "Run") -> bool:
        return self.slot_bytes is None or run.num_bytes <= self.slot_bytes

    @property
    def room(self) -> int:
        """Chunks that may be brought there unasked."""
        in_use = self.num_slots - self.num_free - self.num_ready
        return 0 if in_use >= _FULL * self.num_slots else self.num_free + self.num_ready // _READY_SHARE


@dataclass(frozen=True, slots=True)
class Run:
    """Chunks from a prompt's first on."""

    keys: tuple[ChunkKey, ...]
    num_tokens: int
    """Of each chunk."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Order:
    """`destination` is to bring these chunks of a run, which others hold."""

    run: Run
    positions: tuple[int, ...]
    """Ascending."""
    destination: NodeId

    @property
    def num_bytes(self) -> int:
        return len(self.positions) * self.run.num_bytes


@dataclass(slots=True)
class _Account:
    """Bytes that a node may be sent: filled by time, up to one second's worth; it may be overdrawn by one order."""

    balance: float
    at_s: float

    def fill(self, bytes_per_s: float, now_s: float) -> float:
        self.balance = min(bytes_per_s, self.balance + bytes_per_s * max(0.0, now_s - self.at_s))
        self.at_s = now_s
        return self.balance


@dataclass
class ReplicaPlanner:
    """One conductor's. `bytes_per_s` is what any one node may be given."""

    limits: CopyLimits
    demand: Demand
    bytes_per_s: float
    _hot: OrderedDict[ChunkKey, Run] = field(default_factory=OrderedDict)
    """By last chunk: runs that were used since the last pass, and would have more than one copy."""
    _pending: dict[ChunkKey, dict[NodeId, float]] = field(default_factory=dict)
    """Copies that were ordered, and until when they are counted."""
    _accounts: dict[NodeId, _Account] = field(default_factory=dict)

    def used(self, run: Run, now_s: float, weight: float = 1.0) -> None:
        """A prompt was placed that found this run in the pools. `weight`: prompts that this one stands for."""
        uses = self.demand.use(run.keys, now_s, weight)
        num_hot = next((at for at, each in enumerate(uses) if wanted_copies(each, self.limits) == 1), len(uses))
        if num_hot:
            hot = Run(run.keys[:num_hot], run.num_tokens, run.num_bytes)
            self._hot[hot.keys[-1]] = hot
            self._hot.move_to_end(hot.keys[-1])
            if len(self._hot) > MAX_RUNS:
                self._hot.popitem(last=False)

    def wanted(self, keys: Sequence[ChunkKey], now_s: float, *, pinned: bool = False) -> list[int]:
        """How many copies there should be of each."""
        return [wanted_copies(uses, self.limits, pinned=pinned) for uses in self.demand.uses(keys, now_s)]

    def orders(
        self,
        holders: Callable[[Sequence[ChunkKey]], Sequence[frozenset[NodeId]]],
        pools: Mapping[NodeId, Pool],
        labels: Labels,
        now_s: float,
        pinned: Sequence[Run] = (),
    ) -> list[Order]:
        """What is to be brought now, the most wanted first.

        `holders`: of a run's chunks, up to the first that nobody holds. `pinned`: runs whose chunks are kept in more
        than one place however rarely they are used.
        """
        self._settle(pools, now_s)
        orders: list[Order] = []
        runs = [(run, True) for run in pinned] + [(run, False) for run in self._by_demand(now_s)]
        self._hot.clear()
        for run, is_pinned in runs:
            if len(orders) == MAX_ORDERS:
                break
            order = self._order(run, holders, pools, labels, now_s, is_pinned=is_pinned)
            if order is not None and self.allow(order, now_s):
                orders.append(order)
        return orders

    def allow(self, order: Order, now_s: float) -> bool:
        """Whether its destination may be sent something now. If so, the order counts as given."""
        account = self._account(order.destination, now_s)
        if account.fill(self.bytes_per_s, now_s) <= 0:
            return False
        account.balance -= order.num_bytes
        for position in order.positions:
            self._pending.setdefault(order.run.keys[position], {})[order.destination] = now_s + PENDING_S
        return True

    def is_coming(self, key: ChunkKey, node: NodeId) -> bool:
        """Whether a copy was ordered there."""
        return node in self._pending.get(key, ())

    def expected(self, keys: Sequence[ChunkKey], holders: Sequence[frozenset[NodeId]]) -> list[frozenset[NodeId]]:
        """Those that hold the chunks, which may be fewer than the keys, and those that were told to bring them."""
        return [
            there.union(self._pending[key]) if key in self._pending else there
            for key, there in zip(keys, holders, strict=False)
        ]

    def failed(self, order: Order) -> None:
        """Its destination refused it, or didn't answer: none of it counts as there."""
        for position in order.positions:
            self._pending.get(order.run.keys[position], {}).pop(order.destination, None)

    def _order(
        self,
        run: Run,
        holders: Callable[[Sequence[ChunkKey]], Sequence[frozenset[NodeId]]],
        pools: Mapping[NodeId, Pool],
        labels: Labels,
        now_s: float,
        *,
        is_pinned: bool,
    ) -> Order | None:
        wanted = self.wanted(run.keys, now_s, pinned=is_pinned)
        held = self.expected(run.keys, holders(run.keys))
        first = next((at for at, there in enumerate(held) if len(there) < wanted[at]), None)
        if first is None:
            return None
        before = frozenset(pools).intersection(*held[:first])
        able = [
            pools[node]
            for node in before - held[first]
            if pools[node].room > 0
            and pools[node].can_hold(run)
            and self._account(node, now_s).fill(self.bytes_per_s, now_s) > 0
        ]
        if not able:
            return None
        key = run.keys[first]

        def badness(pool: Pool) -> tuple[int, float, bytes]:
            used = 1 - pool.num_free / pool.num_slots
            busy = pool.num_transfers / max(1, pool.num_slots)
            return nearness(pool.node, held[first], labels), used + busy, lot(key, pool.node)

        chosen = min(able, key=badness)
        positions: list[int] = []
        for at in range(first, len(held)):
            if len(positions) == min(MAX_ORDER_CHUNKS, chosen.room):
                break
            if chosen.node in held[at]:
                continue
            if len(held[at]) >= wanted[at]:
                break
            positions.append(at)
        return Order(run, tuple(positions), chosen.node) if positions else None

    def _by_demand(self, now_s: float) -> list[Run]:
        return sorted(self._hot.values(), key=lambda run: self.demand.uses(run.keys[:1], now_s), reverse=True)

    def _account(self, node: NodeId, now_s: float) -> _Account:
        account = self._accounts.get(node)
        if account is None:
            account = self._accounts[node] = _Account(self.bytes_per_s, now_s)
        return account

    def _settle(self, pools: Mapping[NodeId, Pool], now_s: float) -> None:
        for key, coming in list(self._pending.items()):
            left = {node: until for node, until in coming.items() if until > now_s and node in pools}
            if left:
                self._pending[key] = left
            else:
                del self._pending[key]
        self._accounts = {node: account for node, account in self._accounts.items() if node in pools}
