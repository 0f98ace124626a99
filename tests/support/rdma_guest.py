"""What the second of two machines runs: a broker that both reach, and on it a peer that is read over rdma.

Run as a program: `python -m support.rdma_guest <address>`. Lives until it is killed.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from halfmoon.bus.errors import BusUnavailable
from halfmoon.bus.nats import NatsBus, NatsSettings
from support.nats import nats_server_path
from support.rdma_peer import RdmaPeer, serve_verbs

PORT = 4222


def url_of(address: str) -> str:
    return f"nats://{address}:{PORT}"


async def connect(address: str, timeout_s: float) -> NatsBus:
    """To the other machine's broker, once it is there. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                return await NatsBus.connect(NatsSettings(url=url_of(address)))
            except BusUnavailable:
                continue


async def main() -> None:
    address = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        arguments = ("-a", address, "-p", str(PORT), "-js", "-sd", folder)
        broker = await asyncio.create_subprocess_exec(nats_server_path(), *arguments)
        bus = await connect(address, 60)
        async with RdmaPeer(Path(folder)).serving() as peer:
            await serve_verbs(bus, peer)
            await broker.wait()


if __name__ == "__main__":
    asyncio.run(main())
