"""Where nodes are to each other, by their labels: what a transfer crosses. Pure.

0  the same node        2  one rack        4  nothing in common that is labelled
1  one switch           3  one zone
"""

from collections.abc import Mapping

from halfmoon.schemas.ids import NodeId

Labels = Mapping[NodeId, Mapping[str, str]]

_LEVELS = ("switch", "rack", "zone")
"""Labels, from the nearest to the farthest; a node's `nic` says how fast its end is, not where."""
_FAR = len(_LEVELS) + 1
_NOWHERE: Mapping[str, str] = {}


def distance(labels: Labels, one: NodeId, other: NodeId) -> int:
    if one == other:
        return 0
    ours, theirs = labels.get(one, _NOWHERE), labels.get(other, _NOWHERE)
    for level, name in enumerate(_LEVELS, start=1):
        if name in ours and ours[name] == theirs.get(name):
            return level
    return _FAR


def link_class(labels: Labels, source: NodeId, destination: NodeId) -> str:
    """A name for all links like this one: `rack`, or `zone roce-200→eth-25` where NICs are labelled too."""
    level = distance(labels, source, destination)
    place = "node" if level == 0 else "far" if level == _FAR else _LEVELS[level - 1]
    nics = [labels.get(node, _NOWHERE).get("nic", "") for node in (source, destination)]
    return f"{place} {nics[0]}→{nics[1]}" if any(nics) else place
