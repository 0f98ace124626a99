"""Memory that other processes can map: mappings that know their file, and views that know their place in it."""

from halfmoon.memory.shared_map import Place, SharedMap, place_of

__all__ = ["Place", "SharedMap", "place_of"]
