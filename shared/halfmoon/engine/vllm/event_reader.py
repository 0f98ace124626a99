"""Reads the KV events that vLLM publishes over ZeroMQ, in order."""

import asyncio
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch

from halfmoon.engine.vllm.cache_events import HotChunks


class _Batch(EventBatch):  # type: ignore[misc]
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class EventReader:
    """Owns a socket and the task that reads it, from `start` to `close`."""

    def __init__(self, endpoint: str, chunks: HotChunks) -> None:
        self._endpoint = endpoint
        self._chunks = chunks
        self._decoder = msgspec.msgpack.Decoder(_Batch)
        self._next_seq = 0
        self._context: zmq.asyncio.Context | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Before vLLM begins to publish, so that nothing is missed."""
        self._context = zmq.asyncio.Context()
        socket = self._context.socket(zmq.SUB)
        socket.subscribe(b"")
        socket.connect(self._endpoint)
        self._task = asyncio.create_task(self._read(socket), name="vllm-kv-events")

    async def close(self) -> None:
        """Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    async def _read(self, socket: Any) -> None:
        while True:
            _, number, payload = await socket.recv_multipart()
            seq = int.from_bytes(number, "big")
            if seq != self._next_seq:
                # Some are lost: what they removed would count as hot for ever.
                self._chunks.cleared()
            self._next_seq = seq + 1
            for event in self._decoder.decode(payload).events:
                self._take(event)

    def _take(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        if isinstance(event, BlockStored):
            salt = (event.extra_keys or [None])[0]
            root = self._chunks.root_of(salt[0]) if event.parent_block_hash is None and salt else b""
            self._chunks.stored(event.block_hashes, event.parent_block_hash, event.token_ids, root)
        elif isinstance(event, BlockRemoved):
            self._chunks.removed(event.block_hashes)
        else:
            self._chunks.cleared()
