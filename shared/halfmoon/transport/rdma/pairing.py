"""Which of our ports reads from which of a peer's: pure, so that one can see why."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from halfmoon.schemas.rdma import LinkLayer, RdmaPort

_MAPPED_IPV4 = bytes(10) + b"\xff\xff"
_LINK_LOCAL = b"\xfe\x80"


@dataclass(frozen=True, slots=True)
class PortPair:
    """A port of ours, by its index, and a port of the peer's."""

    own: int
    theirs: RdmaPort


def unreachable(own: RdmaPort, theirs: RdmaPort) -> str | None:
    """Why no packet goes from one to the other, as far as their addresses tell; None where it may."""
    if own.link_layer is not theirs.link_layer:
        return f"{own.device} is {own.link_layer.value} and {theirs.device} {theirs.link_layer.value}"
    if own.link_layer is LinkLayer.INFINIBAND and own.gid[:8] != theirs.gid[:8]:
        return f"{own.device} and {theirs.device} are in different InfiniBand subnets"
    if own.link_layer is LinkLayer.ETHERNET and _family(own.gid) != _family(theirs.gid):
        return f"{own.device} has an address of type {_family(own.gid)}, {theirs.device} of type {_family(theirs.gid)}"
    return None


def pair_ports(
    own: Sequence[RdmaPort], theirs: Sequence[RdmaPort], *, numa_node: int | None, num_queue_pairs: int
) -> tuple[list[PortPair], str]:
    """A port pair for each queue pair of a connection, and where there is none, why.

    Queue pairs are spread over the best port pairs, those that are equally good. What makes a pair good, the first that
    tells them apart decides:

      1. our port is on the NUMA node that our memory is on, so that bytes don't cross between processors;
      2. the slower of the two ports is fast;
      3. both have the same name, as devices on one rail of a rail-optimized fabric have.

    No port is used by more queue pairs than another that is as good.
    """
    reasons: list[str] = []
    candidates: list[tuple[tuple[bool, int], bool, PortPair]] = []
    for index, mine in enumerate(own):
        for port in theirs:
            if (reason := unreachable(mine, port)) is not None:
                reasons.append(reason)
                continue
            is_remote = numa_node is not None and mine.numa_node is not None and mine.numa_node != numa_node
            speed = min(mine.speed_mbps, port.speed_mbps)
            candidates.append(((is_remote, -speed), mine.device != port.device, PortPair(index, port)))
    if not candidates:
        return [], "; ".join(dict.fromkeys(reasons)) or "one of the two nodes has no port"
    best = min(rank for rank, _, _ in candidates)
    equals = [(is_other_rail, pair) for rank, is_other_rail, pair in candidates if rank == best]
    own_uses: Counter[int] = Counter()
    their_uses: Counter[str] = Counter()
    chosen: list[PortPair] = []
    for _ in range(num_queue_pairs):
        _, pair = min(
            equals,
            key=lambda each: (
                own_uses[each[1].own] + their_uses[each[1].theirs.device],
                each[0],
                each[1].own,
                each[1].theirs.device,
            ),
        )
        own_uses[pair.own] += 1
        their_uses[pair.theirs.device] += 1
        chosen.append(pair)
    return chosen, ""


def address_rank(gid: bytes, is_routable: bool) -> tuple[bool, bool, bool]:
    """For `max`: which address of a port to be reached by. Routable (RoCE v2) first, then IPv4, then global IPv6."""
    return is_routable, gid[:12] == _MAPPED_IPV4, gid[:2] != _LINK_LOCAL


def _family(gid: bytes) -> str:
    return "IPv4" if gid[:12] == _MAPPED_IPV4 else "IPv6"
