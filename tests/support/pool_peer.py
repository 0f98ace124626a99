"""A peer whose arena is read over a transport: in this process, or in one of its own that can be killed or stopped.

Run as a program: `python -m support.pool_peer <directory> <secret or -> <port> <epoch> <end of its lease>`; prints its
NodeInfo as JSON, then lives until its input ends.
"""

import functools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from halfmoon.pool.arena import Arena, arena_path
from halfmoon.schemas.ids import LeaseId, NodeId
from halfmoon.schemas.kv_tier import NodeInfo
from halfmoon.transport.protocol import ReadOutcome
from halfmoon.transport.shm import refusal
from halfmoon.transport.tcp_server import TcpServer
from support.wait import until_blocking

NODE = NodeId("peer")
HOST = "host-a"
SLOT_BYTES = 1 << 20
NUM_SLOTS = 8
GENERATION = 7
GOOD_LEASE = LeaseId("lease-good")
NEVER_NS = 2**62


@functools.cache
def payload(slot: int, epoch: int = 1) -> bytes:
    """What the peer holds in a slot: the same in every process."""
    return random.Random(1000 * epoch + slot).randbytes(SLOT_BYTES)


class Peer:
    """An arena full of known bytes, served over tcp."""

    def __init__(
        self, directory: Path, secret: str | None, *, port: int = 0, epoch: int = 1, lease_ends_ns: int = NEVER_NS
    ) -> None:
        self.arena = Arena.create(arena_path(directory, NODE, epoch), SLOT_BYTES, NUM_SLOTS)
        for slot in range(NUM_SLOTS):
            self.arena.slot(slot)[:] = payload(slot, epoch)
            self.arena.tables.set_generation(slot, GENERATION)
            self.arena.tables.set_readable_bytes(slot, SLOT_BYTES)
        self.arena.tables.set_lease(GOOD_LEASE, lease_ends_ns)
        self.server = TcpServer(self.arena, NODE, epoch, self.authorize, secret=secret, port=port)
        self.server.start()
        self.info = NodeInfo(
            node=NODE,
            epoch=epoch,
            host=HOST,
            arena_path=str(self.arena.path),
            slot_bytes=SLOT_BYTES,
            num_slots=NUM_SLOTS,
            tcp_address=self.server.address,
        )

    def authorize(self, lease_id: LeaseId, slot: int, generation: int, end: int) -> tuple[ReadOutcome, str] | None:
        return refusal(self.arena.tables, lease_id, slot, generation, end, time.time_ns())

    def close(self) -> None:
        self.server.close()
        self.arena.close()
        self.arena.unlink()


class AnyPeerProcess:
    """A peer in a process of its own: a program that prints its NodeInfo, and lives until its input ends."""

    def __init__(self, module: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        self.info = msgspec.json.decode(self.process.stdout.readline(), type=NodeInfo)

    def kill(self) -> None:
        self.process.kill()

    def freeze(self) -> None:
        """Stop it, and return when none of its threads runs any more."""
        self.process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self.process.pid}/task")
        until_blocking(lambda: all(_state(thread) == "T" for thread in threads.iterdir()), what="every thread stopped")

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        Path(self.info.arena_path).unlink(missing_ok=True)


class PeerProcess(AnyPeerProcess):
    """A `Peer`."""

    def __init__(
        self, directory: Path, secret: str | None, *, port: int = 0, epoch: int = 1, lease_ends_ns: int = NEVER_NS
    ) -> None:
        super().__init__("support.pool_peer", directory, secret or "-", port, epoch, lease_ends_ns)


def _state(thread: Path) -> str:
    """`R`, `S`, `T`…: the field behind the name, which is in parentheses and may hold anything."""
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


def main() -> None:
    directory, secret, *numbers = sys.argv[1:]
    port, epoch, lease_ends_ns = (int(number) for number in numbers)
    peer = Peer(Path(directory), None if secret == "-" else secret, port=port, epoch=epoch, lease_ends_ns=lease_ends_ns)
    sys.stdout.buffer.write(msgspec.json.encode(peer.info) + b"\n")
    sys.stdout.buffer.flush()
    sys.stdin.read()
    peer.close()


if __name__ == "__main__":
    main()
