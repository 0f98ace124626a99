"""What one node reads and is read with: its devices, and its arena registered on each of them, once."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from halfmoon.pool.arena import Arena
from halfmoon.schemas.rdma import RdmaOffer
from halfmoon.transport.rdma.device import Device, Region, open_devices, own_numa_node
from halfmoon.transport.rdma.verbs import load_verbs


@dataclass(frozen=True, slots=True)
class Nic:
    """A device, and the arena as it knows it."""

    device: Device
    arena: Region


@dataclass(frozen=True, slots=True)
class RdmaNode:
    """Close it after the transport and the server that use it."""

    nics: tuple[Nic, ...]
    windows: bool
    numa_node: int | None
    """Where this process, and so its memory, lives; None where that is everywhere."""

    @classmethod
    def open(
        cls, arena: Arena, *, names: Sequence[str] = (), gid_index: int | None = None, windows: bool = True
    ) -> "RdmaNode":
        """Open the named devices (all, where none is named), and register the arena, which must be writable.

        `windows`: open slots to readers by memory windows, where every device has them. Pins the arena's memory: blocks
        for a while, and holds the interpreter lock. Raises `RdmaUnavailable`.
        """
        devices = open_devices(load_verbs(), names, gid_index)
        with contextlib.ExitStack() as undo:
            for device in devices:
                undo.callback(device.close)
            windows = windows and all(device.has_windows for device in devices)
            nics: list[Nic] = []
            for device in devices:
                region = device.register(arena.whole(), for_windows=windows, for_readers=not windows)
                undo.callback(region.close)
                nics.append(Nic(device, region))
            undo.pop_all()
        return cls(tuple(nics), windows, own_numa_node())

    @property
    def offer(self) -> RdmaOffer:
        return RdmaOffer(ports=tuple(nic.device.port for nic in self.nics), windows=self.windows)

    def close(self) -> None:
        for nic in self.nics:
            nic.arena.close()
            nic.device.close()
