"""Devices and the memory that they may touch."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halfmoon.schemas.rdma import LinkLayer, RdmaPort
from halfmoon.transport.rdma.pairing import address_rank
from halfmoon.transport.rdma.verbs import RdmaUnavailable, Verbs

_SYS_DEVICES = Path("/sys/class/infiniband")
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_MAX_GIDS = 256
_LANE_MBPS = {1: 2_500, 2: 5_000, 4: 10_000, 8: 10_000, 16: 14_000, 32: 25_000, 64: 50_000, 128: 100_000, 256: 200_000}
_NUM_LANES = {1: 1, 2: 4, 4: 8, 8: 12, 16: 2}
"""What the codes for speed and width mean (InfiniBand Architecture Specification, volume 1, PortInfo)."""


class Region:
    """Registered memory: pinned, and known to the device until `close`. Keeps the memory alive."""

    def __init__(self, verbs: Verbs, domain: Any, view: memoryview, access: int) -> None:
        self._view = view
        self.address = int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
        self.num_bytes = view.nbytes
        self.handle: Any = verbs.mr.MR(domain, view.nbytes, access, address=self.address)
        self.local_key = int(self.handle.lkey)
        self.remote_key = int(self.handle.rkey)

    def covers(self, address: int, num_bytes: int) -> bool:
        return self.address <= address and address + num_bytes <= self.address + self.num_bytes

    def close(self) -> None:
        self.handle.close()


@dataclass(frozen=True, slots=True)
class Device:
    """An open device, with its first active port."""

    verbs: Verbs
    context: Any
    domain: Any
    """The protection domain: memory and queue pairs of another can't be used together with those of this one."""
    port: RdmaPort
    has_windows: bool
    """Whether it has memory windows that are bound to one queue pair (type 2B)."""

    @classmethod
    def open(cls, verbs: Verbs, name: str, gid_index: int | None) -> "Device":
        """Raises `RdmaUnavailable` where it has no active port with an address."""
        try:
            context = verbs.device.Context(name=name)
            limits = context.query_device()
            port = _active_port(verbs, context, name, limits, gid_index)
            flags = int(limits.device_cap_flags)
            return cls(
                verbs=verbs,
                context=context,
                domain=verbs.pd.PD(context),
                port=port,
                has_windows=bool(flags & verbs.enums.IBV_DEVICE_MEM_WINDOW_TYPE_2B),
            )
        except verbs.error as error:
            raise RdmaUnavailable(f"{name} can't be used: {error}") from None

    def register(self, view: memoryview, *, for_windows: bool = False, for_readers: bool = False) -> Region:
        """Let the device write to this memory on our behalf; and others read it, through windows or as a whole.

        Raises `RdmaUnavailable`.
        """
        enums = self.verbs.enums
        access = int(enums.IBV_ACCESS_LOCAL_WRITE)
        access |= int(enums.IBV_ACCESS_MW_BIND) if for_windows else 0
        access |= int(enums.IBV_ACCESS_REMOTE_READ) if for_readers else 0
        try:
            return Region(self.verbs, self.domain, view, access)
        except self.verbs.error as error:
            raise RdmaUnavailable(
                f"{self.port.device} can't register {view.nbytes / 2**20:,.0f} MiB ({error}): it pins what it touches, "
                "so raise the limit (ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; docker: --ulimit "
                "memlock=-1), or lower arena_bytes"
            ) from None

    def close(self) -> None:
        self.domain.close()
        self.context.close()


def open_devices(verbs: Verbs, names: Sequence[str], gid_index: int | None) -> list[Device]:
    """The named devices, all where none is named, those without an active port left out.

    Raises `RdmaUnavailable` where none is left, or a named one isn't there.
    """
    try:
        present = sorted(each.name.decode() for each in verbs.device.get_device_list())
    except verbs.error:
        present = []  # How rdma-core says that the kernel has no RDMA at all.
    if missing := [name for name in names if name not in present]:
        raise RdmaUnavailable(f"there is no RDMA device {', '.join(missing)}; there is {', '.join(present) or 'none'}")
    devices: list[Device] = []
    reasons: list[str] = []
    for name in names or present:
        try:
            devices.append(Device.open(verbs, name, gid_index))
        except RdmaUnavailable as error:
            reasons.append(str(error))
    if not devices:
        raise RdmaUnavailable("; ".join(reasons) or "this machine has no RDMA device")
    return devices


def own_numa_node(sys_nodes: Path = Path("/sys/devices/system/node")) -> int | None:
    """The NUMA node whose processors this process is bound to; None where it may run on several."""
    allowed = os.sched_getaffinity(0)
    nodes = [
        int(each.name.removeprefix("node"))
        for each in sys_nodes.glob("node[0-9]*")
        if (processors := _numbers((each / "cpulist").read_text())) and processors & allowed
    ]
    return nodes[0] if len(nodes) == 1 else None


def _active_port(verbs: Verbs, context: Any, name: str, limits: Any, gid_index: int | None) -> RdmaPort:
    for number in range(1, int(limits.phys_port_cnt) + 1):
        facts = context.query_port(number)
        if int(facts.state) != int(verbs.enums.IBV_PORT_ACTIVE):
            continue
        is_ethernet = int(facts.link_layer) == int(verbs.enums.IBV_LINK_LAYER_ETHERNET)
        found = _address(verbs, context, number, min(int(facts.gid_tbl_len), _MAX_GIDS), gid_index)
        if found is None:
            continue
        numa_node, pci_address = _place(name)
        return RdmaPort(
            device=name,
            port=number,
            link_layer=LinkLayer.ETHERNET if is_ethernet else LinkLayer.INFINIBAND,
            gid=found[1],
            gid_index=found[0],
            lid=int(facts.lid),
            mtu_bytes=128 << int(facts.active_mtu),
            speed_mbps=_LANE_MBPS.get(int(facts.active_speed), 0) * _NUM_LANES.get(int(facts.active_width), 0),
            numa_node=numa_node,
            pci_address=pci_address,
            max_reads=int(limits.max_qp_rd_atom),
            max_initiated_reads=int(limits.max_qp_init_rd_atom),
            max_message_bytes=int(facts.max_msg_sz),
        )
    wanted = "" if gid_index is None else f" at GID index {gid_index}"
    raise RdmaUnavailable(f"{name} has no active port with an address{wanted}: see `rdma link` and `ibv_devinfo -v`")


def _address(verbs: Verbs, context: Any, port: int, num_gids: int, wanted: int | None) -> tuple[int, bytes] | None:
    """Index and GID of the address to be reached by."""
    found: list[tuple[tuple[bool, bool, bool], int, bytes]] = []
    for index in range(num_gids) if wanted is None else [wanted]:
        try:
            gid = bytes.fromhex(str(context.query_gid(port, index).gid).replace(":", ""))
            is_routable = int(context.query_gid_type(port, index)) == int(verbs.enums.IBV_GID_TYPE_SYSFS_ROCE_V2)
        except verbs.error:
            continue  # An empty entry of the table.
        if any(gid):
            found.append((address_rank(gid, is_routable), -index, gid))
    if not found:
        return None
    _, index, gid = max(found)
    return -index, gid


def _place(name: str) -> tuple[int | None, str | None]:
    """NUMA node and PCI address of a device; None for what isn't known, as of one made of software."""
    place = _SYS_DEVICES / name / "device"
    try:
        numa_node = int((place / "numa_node").read_text())
    except (OSError, ValueError):
        numa_node = -1
    address = place.resolve().name
    return None if numa_node < 0 else numa_node, address if _PCI_ADDRESS.fullmatch(address) else None


def _numbers(ranges: str) -> set[int]:
    """`0-3,8` as numbers."""
    found: set[int] = set()
    for part in ranges.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found
