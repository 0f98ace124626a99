"""The ways into other nodes' memory, best first, and the way into this one's."""

import asyncio
import contextlib
import socket
import time

import structlog

from halfmoon.kv_tier.config import KvTierConfig
from halfmoon.kv_tier.store import ChunkStore
from halfmoon.lifecycle.runtime import StartupError
from halfmoon.pool.arena import Arena
from halfmoon.schemas.ids import LeaseId, NodeId
from halfmoon.transport.protocol import ReadOutcome, Transport
from halfmoon.transport.shm import ShmTransport
from halfmoon.transport.tcp import TcpTransport
from halfmoon.transport.tcp_server import Authorize, TcpServer, is_loopback


def make_transports(config: KvTierConfig, rdma: Transport) -> list[Transport]:
    """What this node can read with, best first; each says by itself which peers it can reach."""
    return [ShmTransport(config.host), rdma, TcpTransport(config.cluster_secret)]


def authorizer(store: ChunkStore) -> Authorize:
    """Who may read what, by the leases of this pool. Any thread may ask."""

    def authorize(lease_id: LeaseId, slot: int, generation: int, end: int) -> tuple[ReadOutcome, str] | None:
        return store.ledger.refusal(lease_id, slot, generation, end, time.time_ns())

    return authorize


def serve_tcp(
    config: KvTierConfig,
    arena: Arena,
    store: ChunkStore,
    epoch: int,
    undo: contextlib.AsyncExitStack,
    log: structlog.stdlib.BoundLogger,
) -> TcpServer:
    """Serve this arena to who holds a lease, until `undo`. Raises `StartupError`."""
    server = TcpServer(
        arena,
        NodeId(config.node),
        epoch,
        authorizer(store),
        secret=config.cluster_secret,
        host=config.bind_host,
        port=config.bind_port,
    )
    try:
        server.start()
    except OSError as error:
        raise StartupError(
            f"can't serve tcp on {config.bind_host}:{config.bind_port}: {error.strerror or error}; "
            "set bind_host and bind_port, or bind_port 0 for a free one"
        ) from None
    undo.push_async_callback(asyncio.to_thread, server.close)
    if config.cluster_secret is None and not is_loopback(config.bind_host):
        log.warning("no cluster_secret is set: only this machine will be served", bind_host=config.bind_host)
    return server


def advertised(config: KvTierConfig, address: str) -> str:
    """`host:port` for others, of a server that listens on `address`."""
    bound, _, port = address.rpartition(":")
    host = config.advertised_host or bound
    if host in ("0.0.0.0", "[::]"):
        host = socket.gethostname()
    return f"{host}:{port}"
