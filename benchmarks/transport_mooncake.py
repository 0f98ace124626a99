"""Mooncake's transfer engine over tcp, as a measure: run by its own interpreter, which needs nothing of halfmoon.

python transport_mooncake.py serve <bytes>                    prints "<port> <address>", lives until its input ends
python transport_mooncake.py read <port> <address> <slice bytes> <num slices> <rounds>   one "<GB/s> <CPU s>" a line
"""

import mmap
import sys
import time
from typing import Any

HOST = "127.0.0.1"


def region(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Touched memory and its address."""
    import ctypes

    memory = mmap.mmap(-1, num_bytes)
    for start in range(0, num_bytes, 4096):
        memory[start] = 1
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def engine() -> Any:
    from mooncake.engine import TransferEngine  # type: ignore[import-not-found]

    made = TransferEngine()
    if made.initialize(HOST, "P2PHANDSHAKE", "tcp", "") != 0:
        raise SystemExit("the transfer engine doesn't start")
    return made


def serve(num_bytes: int) -> None:
    memory, address = region(num_bytes)
    made = engine()
    if made.register_memory(address, num_bytes) != 0:
        raise SystemExit("the transfer engine doesn't take the memory")
    print(f"PORT {made.get_rpc_port()} {address}", flush=True)
    sys.stdin.read()
    del memory


def read(port: int, remote: int, slice_bytes: int, num_slices: int, rounds: int) -> None:
    total = slice_bytes * num_slices
    memory, local = region(total)
    made = engine()
    if made.register_memory(local, total) != 0:
        raise SystemExit("the transfer engine doesn't take the memory")
    offsets = range(0, total, slice_bytes)
    here, there = [local + offset for offset in offsets], [remote + offset for offset in offsets]
    lengths = [slice_bytes] * num_slices
    print("READY", flush=True)
    for _ in sys.stdin:
        for _ in range(rounds):
            cpu, started = time.process_time(), time.perf_counter()
            if made.batch_transfer_sync_read(f"{HOST}:{port}", here, there, lengths) != 0:
                raise SystemExit("the transfer failed")
            print(f"ROUND {time.perf_counter() - started} {time.process_time() - cpu}", flush=True)
    del memory


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        read(*(int(text) for text in sys.argv[2:7]))
