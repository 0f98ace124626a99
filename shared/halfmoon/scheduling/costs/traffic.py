"""What nodes are sending and receiving: their pools' heartbeats, and pulls that were asked for since. Pure.

A heartbeat is up to 250 ms old. Every conductor hears every half that any of them sends, and a half names the chunks
that it has its node pull; without them a burst would all pull from the node that looked idle when it began.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from halfmoon.schemas.ids import NodeId

SHOWN_AFTER_S = 0.35
"""A pull that was asked for so long before a heartbeat is in it, or done."""


@dataclass(slots=True)
class _Receiver:
    told: Mapping[NodeId, int] = field(default_factory=dict)
    """Bytes under way, by source."""
    asked: list[tuple[float, NodeId, int]] = field(default_factory=list)


class Traffic:
    """Bytes under way between nodes."""

    def __init__(self) -> None:
        self._receivers: dict[NodeId, _Receiver] = {}
        self._into: Counter[NodeId] = Counter()
        self._out_of: Counter[NodeId] = Counter()

    def hear(self, node: NodeId, receiving: Mapping[NodeId, int], now_s: float) -> None:
        """A pool's own word, by source."""
        receiver = self._receivers.setdefault(node, _Receiver())
        if not receiving and not receiver.told and not receiver.asked:
            return
        self._count(node, receiver, -1)
        receiver.told = dict(receiving)
        receiver.asked = [asked for asked in receiver.asked if now_s - asked[0] < SHOWN_AFTER_S]
        self._count(node, receiver, 1)

    def asked(self, node: NodeId, num_bytes: Mapping[NodeId, int], now_s: float) -> None:
        """A half was sent that has this node pull so much from each source."""
        receiver = self._receivers.setdefault(node, _Receiver())
        for source, amount in num_bytes.items():
            receiver.asked.append((now_s, source, amount))
            self._into[node] += amount
            self._out_of[source] += amount

    def forget(self, node: NodeId) -> None:
        receiver = self._receivers.pop(node, None)
        if receiver is not None:
            self._count(node, receiver, -1)

    def ahead(self, source: NodeId, destination: NodeId) -> int:
        """Bytes that a new pull shares a link with: the busier of both ends decides."""
        return max(self._out_of[source], self._into[destination])

    def moving(self, node: NodeId) -> int:
        return max(self._out_of[node], self._into[node])

    def _count(self, node: NodeId, receiver: _Receiver, sign: int) -> None:
        for source, amount in [*receiver.told.items(), *((source, amount) for _, source, amount in receiver.asked)]:
            self._into[node] += sign * amount
            self._out_of[source] += sign * amount
