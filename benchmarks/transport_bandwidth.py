"""How fast chunks move between two processes: `python benchmarks/transport_bandwidth.py [chunk MiB] [chunks]`.

The peer is a process of its own; chunks are read into another arena, page-aligned and touched, as a kv-tier does.
Prints the median over rounds, without and with the checksum that a kv-tier verifies.
"""

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from halfmoon.chunks.checksum import checksum
from halfmoon.pool.arena import Arena
from halfmoon.schemas.ids import LeaseId, NodeId
from halfmoon.schemas.kv_tier import NodeInfo
from halfmoon.transport.protocol import ReadOutcome, SliceRead, Transport
from halfmoon.transport.shm import ShmTransport
from halfmoon.transport.tcp import TcpTransport
from halfmoon.transport.tcp_server import TcpServer

ROUNDS = 9
SHM = Path("/dev/shm")


def serve(directory: str, slot_bytes: int, num_slots: int) -> None:
    """The peer: until its input ends."""
    arena = Arena.create(Path(directory) / "peer", slot_bytes, num_slots)
    for slot in range(num_slots):
        arena.tables.set_readable_bytes(slot, slot_bytes)
    arena.tables.set_lease(LeaseId("l"), 2**62)
    server = TcpServer(arena, NodeId("peer"), 1, lambda *_: None, secret="bench")
    server.start()
    info = NodeInfo(
        node=NodeId("peer"),
        epoch=1,
        host="here",
        arena_path=str(arena.path),
        slot_bytes=slot_bytes,
        num_slots=num_slots,
        tcp_address=server.address,
    )
    print(msgspec.json.encode(info).decode(), flush=True)
    sys.stdin.read()
    server.close()
    arena.close()


async def measure(transport: Transport, info: NodeInfo, arena: Arena, at_once: int) -> tuple[float, float]:
    """GB/s without and with checksums; `at_once` batches run side by side."""
    slices = [SliceRead(slot, 0, 0, arena.slot(slot)) for slot in range(info.num_slots)]
    total = info.num_slots * info.slot_bytes

    async def read(batch: list[SliceRead], *, verify: bool) -> None:
        results = await transport.read(info, LeaseId("l"), batch, deadline_ns=time.time_ns() + 60_000_000_000)
        assert all(result.outcome is ReadOutcome.OK for result in results), results
        for each in batch if verify else ():
            await asyncio.to_thread(checksum, each.destination)

    speeds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(ROUNDS):
        for verify, found in speeds.items():
            started = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for lane in range(at_once):
                    group.create_task(read(slices[lane::at_once], verify=verify))
            found.append(total / (time.perf_counter() - started) / 1e9)
    return statistics.median(speeds[False]), statistics.median(speeds[True])


@dataclass(frozen=True, slots=True)
class Bandwidth:
    transport: str
    at_once: int
    """Batches side by side."""
    plain_gb_per_s: float
    verified_gb_per_s: float


async def compare(info: NodeInfo, arena: Arena) -> list[Bandwidth]:
    figures = []
    for at_once in (1, 2):
        for transport in (ShmTransport("here"), TcpTransport("bench")):
            figures.append(Bandwidth(transport.name, at_once, *await measure(transport, info, arena, at_once)))
            await transport.close()
    return figures


def run(slot_bytes: int = 4 << 20, num_slots: int = 64) -> list[Bandwidth]:
    """Both transports against a peer process, one and two batches at a time."""
    with tempfile.TemporaryDirectory(dir=SHM) as directory:
        peer = subprocess.Popen(
            [sys.executable, __file__, "serve", directory, str(slot_bytes), str(num_slots)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with peer:
            assert peer.stdout is not None
            info = msgspec.json.decode(peer.stdout.readline(), type=NodeInfo)
            arena = Arena.create(Path(directory) / "own", slot_bytes, num_slots)
            figures = asyncio.run(compare(info, arena))
            arena.close()
            peer.terminate()
    return figures


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        numbers = [int(text) for text in sys.argv[1:]]
        for found in run((numbers[0] if numbers else 4) << 20, numbers[1] if len(numbers) > 1 else 64):
            print(
                f"{found.transport}  {found.at_once} at once  {found.plain_gb_per_s:5.1f} GB/s  "
                f"verified {found.verified_gb_per_s:5.1f} GB/s"
            )
