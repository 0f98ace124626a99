"""Sets of nodes, each kept once and referred to by number: what the chunk index knows of who holds a chunk. Pure.

Many chunks have the same holders (chunks of one prompt, all that one node alone has), so a chunk needs no set of its
own, only the number of one. And when a node goes, the sets are changed, not the chunks: however many it held.

    key ──→ number ──→ bits of the nodes ──→ the live ones among them, a frozenset (made when first asked for)

A node that has an SSD tier has two bits: of a chunk that it holds, one says that it is in memory, the other that it is
on the SSD only.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Final

from halfmoon.schemas.ids import NodeId

NOBODY: Final = 0
"""The number of the empty set."""
_NONE: Final[frozenset[NodeId]] = frozenset()


class HolderSets:
    """Counts how many chunks refer to each set; one that none refers to is dropped, and its number used again."""

    def __init__(self) -> None:
        self._bits: dict[NodeId, int] = {}
        self._ssd_bits: dict[NodeId, int] = {}
        self._nodes: dict[int, NodeId] = {}
        """By bit, of either kind."""
        self._ssd = 0
        """All bits that say `on the SSD`."""
        self._by_ssd_mask: dict[int, frozenset[NodeId]] = {}
        """What such bits, of trusted nodes, are called."""
        self._masks: list[int] = [0]
        self._num_chunks: list[int] = [0]
        self._numbers: dict[int, int] = {0: NOBODY}
        """Mask → number. Where sets have become equal since a node went, one of them; the others stay as they are."""
        self._unused: list[int] = []
        self._trusted_nodes: frozenset[NodeId] = frozenset()
        self._trusted = 0
        """The bits of those among them that have one."""
        self._visible: list[frozenset[NodeId]] = [_NONE]
        """By number: the trusted nodes of each set. Empty where there are none, or where nobody has asked yet."""
        self.num_orphans = 0
        """Chunks whose set has become empty because its nodes went."""

    def __len__(self) -> int:
        """Number of sets in use, the empty one among them."""
        return len(self._masks) - len(self._unused)

    def is_empty(self, number: int) -> bool:
        return not self._masks[number]

    def nodes(self, number: int) -> frozenset[NodeId]:
        """All nodes of a set, live or not."""
        return frozenset(self._named(self._masks[number]))

    def nodes_on_ssd(self, number: int) -> frozenset[NodeId]:
        """Those of them that have it on the SSD only."""
        return frozenset(self._named(self._masks[number] & self._ssd))

    def including(self, number: int, node: NodeId, *, on_ssd: bool = False) -> int:
        """Move one chunk from a set (`NOBODY`: a new chunk) to the one that has `node` too; that one's number.

        `on_ssd`: that node has it on the SSD only, whatever was known before.
        """
        mask = self._masks[number]
        bit = (self._ssd_bits if on_ssd else self._bits).get(node) or self._assign(node, on_ssd=on_ssd)
        other = self._bits.get(node, 0) if on_ssd else self._ssd_bits.get(node, 0)
        return number if mask & bit else self._move(number, mask & ~other | bit)

    def excluding(self, number: int, node: NodeId) -> int:
        """Move one chunk from a set to the one without `node`; that one's number, `NOBODY` where none is left."""
        mask = self._masks[number]
        bits = self._bits.get(node, 0) | self._ssd_bits.get(node, 0)
        return self._move(number, mask & ~bits) if mask & bits else number

    def forget(self, number: int) -> None:
        """A chunk that referred to this set is gone from the index."""
        self._leave(number)

    def remove(self, node: NodeId) -> None:
        """Take a node out of all sets."""
        bit, ssd_bit = self._bits.pop(node, 0), self._ssd_bits.pop(node, 0)
        bits = bit | ssd_bit
        if not bits:
            return
        for each in filter(None, (bit, ssd_bit)):
            del self._nodes[each]
        self._trusted &= ~bits
        self._ssd &= ~bits
        self._by_ssd_mask.clear()
        for number, mask in enumerate(self._masks):
            if mask & bits:
                if self._numbers.get(mask) == number:
                    del self._numbers[mask]
                rest = mask & ~bits
                self._masks[number] = rest
                self._visible[number] = _NONE
                if rest:
                    self._numbers.setdefault(rest, number)
                else:
                    self.num_orphans += self._num_chunks[number]

    def trust(self, nodes: frozenset[NodeId]) -> None:
        """From now on `visible` names these nodes only."""
        self._trusted_nodes = nodes
        self._trusted = sum(bit for bit, node in self._nodes.items() if node in nodes)
        self._by_ssd_mask.clear()
        self._visible = [_NONE] * len(self._masks)

    def visible(self, numbers: Sequence[int]) -> tuple[frozenset[NodeId], ...]:
        """The trusted nodes of each set, up to the first that has none."""
        if numbers and numbers.count(numbers[0]) == len(numbers):  # mostly: chunks of one prompt go together
            nodes = self._visible[numbers[0]] or self._reveal(numbers[0])
            return (nodes,) * len(numbers) if nodes else ()
        found = tuple(map(self._visible.__getitem__, numbers))
        return found if all(found) else tuple(takewhile(bool, map(self._reveal, numbers)))

    def on_ssd(self, numbers: Sequence[int]) -> tuple[frozenset[NodeId], ...]:
        """For each set those of its trusted nodes that have the chunk on the SSD only; empty where no node has any."""
        bits = self._trusted & self._ssd
        return tuple(self._ssd_nodes(self._masks[number] & bits) for number in numbers) if bits else ()

    def _ssd_nodes(self, mask: int) -> frozenset[NodeId]:
        nodes = self._by_ssd_mask.get(mask)
        if nodes is None:
            nodes = self._by_ssd_mask[mask] = frozenset(self._named(mask))
        return nodes

    def _reveal(self, number: int) -> frozenset[NodeId]:
        nodes = self._visible[number] = frozenset(self._named(self._masks[number] & self._trusted))
        return nodes

    def _move(self, number: int, mask: int) -> int:
        target = self._numbers.get(mask)
        if target is None:
            target = self._new(mask)
        if target != NOBODY:
            self._num_chunks[target] += 1
        if number != NOBODY:
            self._leave(number)
        return target

    def _leave(self, number: int) -> None:
        self._num_chunks[number] -= 1
        mask = self._masks[number]
        if not mask:
            self.num_orphans -= 1
        if self._num_chunks[number]:
            return
        if mask and self._numbers.get(mask) == number:
            del self._numbers[mask]
        self._masks[number] = 0
        self._visible[number] = _NONE
        self._unused.append(number)

    def _new(self, mask: int) -> int:
        if self._unused:
            number = self._unused.pop()
            self._masks[number] = mask
            self._visible[number] = _NONE
        else:
            number = len(self._masks)
            self._masks.append(mask)
            self._num_chunks.append(0)
            self._visible.append(_NONE)
        self._numbers[mask] = number
        return number

    def _assign(self, node: NodeId, *, on_ssd: bool) -> int:
        """The lowest bit that no node has: those of nodes that went are used again, so that masks stay short."""
        taken = sum(self._nodes)
        bit = ~taken & (taken + 1)
        if on_ssd:
            self._ssd_bits[node] = bit
            self._ssd |= bit
        else:
            self._bits[node] = bit
        self._nodes[bit] = node
        if node in self._trusted_nodes:
            self._trusted |= bit
        return bit

    def _named(self, mask: int) -> Iterator[NodeId]:
        while mask:
            bit = mask & -mask
            yield self._nodes[bit]
            mask ^= bit
