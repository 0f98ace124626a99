"""The other end of the transports' measurements: an arena in a process of its own, served over tcp."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from halfmoon.pool.arena import Arena
from halfmoon.schemas.ids import LeaseId, NodeId
from halfmoon.schemas.kv_tier import NodeInfo
from halfmoon.transport.protocol import ReadOutcome
from halfmoon.transport.shm import refusal
from halfmoon.transport.slices import share_interpreter
from halfmoon.transport.tcp_server import TcpServer

HOST = "here"
SECRET = "bench"
LEASE = LeaseId("lease-bench")
_NEVER_NS = 2**62
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Peer:
    info: NodeInfo
    pid: int

    def cpu_s(self) -> float:
        return process_cpu_s(self.pid)


def process_cpu_s(pid: int) -> float:
    """Processor time of another process so far, user's and system's; in steps of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


@contextlib.contextmanager
def running_peer(directory: Path, slot_bytes: int, num_slots: int) -> Iterator[Peer]:
    """Serves until the block ends. All slots are held by the lease `LEASE`, in generation 0."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.transport_peer", str(directory), str(slot_bytes), str(num_slots)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
    )
    with process:
        assert process.stdout is not None
        yield Peer(msgspec.json.decode(process.stdout.readline(), type=NodeInfo), process.pid)
        process.terminate()


def serve(directory: str, slot_bytes: int, num_slots: int) -> None:
    arena = Arena.create(Path(directory) / f"peer-{slot_bytes}", slot_bytes, num_slots)
    for slot in range(num_slots):
        arena.tables.set_readable_bytes(slot, slot_bytes)
    arena.tables.set_lease(LEASE, _NEVER_NS)

    def authorize(lease_id: LeaseId, slot: int, generation: int, end: int) -> tuple[ReadOutcome, str] | None:
        return refusal(arena.tables, lease_id, slot, generation, end, time.time_ns())

    share_interpreter()
    server = TcpServer(arena, NodeId("peer"), 1, authorize, secret=SECRET)
    server.start()
    info = NodeInfo(
        node=NodeId("peer"),
        epoch=1,
        host=HOST,
        arena_path=str(arena.path),
        slot_bytes=slot_bytes,
        num_slots=num_slots,
        tcp_address=server.address,
    )
    print(msgspec.json.encode(info).decode(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
