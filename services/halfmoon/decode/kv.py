"""How a prompt's KV gets into its sequence: announced chunk by chunk, computed here, or not at all."""

import asyncio
import time
from collections.abc import Callable
from typing import assert_never

import structlog

from halfmoon.bus import endpoint
from halfmoon.bus.errors import BusError
from halfmoon.bus.protocol import Bus
from halfmoon.decode.config import DecodeConfig
from halfmoon.decode.policy import Generate, Pull, Recompute, Wait, is_lost, next_step
from halfmoon.decode.pull import ChunkPuller
from halfmoon.decode.state import HalfEvent, KvProgress
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import RequestId, TransferId, WorkerId
from halfmoon.schemas.members import MEMBER_LOST_AFTER_S
from halfmoon.schemas.splits import KvFailed, KvReady, TransferDone
from halfmoon.worker.leases import LeaseSet
from halfmoon.worker.peers import PeerWatch, Watched
from halfmoon.worker.sequences import OpenSequence

CHECK_S = 0.1
"""How often a waiting half looks whether its prefill worker is still there."""


class Transfer:
    """One hand-over, as decode sees it: what is announced, who provides it, and whether to go on waiting."""

    def __init__(
        self,
        request_id: RequestId,
        transfer_id: TransferId,
        progress: KvProgress,
        *,
        bus: Bus,
        peers: PeerWatch,
        puller: ChunkPuller,
        config: DecodeConfig,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self.progress = progress
        self._request_id = request_id
        self._transfer_id = transfer_id
        self._bus = bus
        self._peers = peers
        self._puller = puller
        self._config = config
        self._log = log
        self._news = asyncio.Event()
        self._news_s = time.monotonic()
        self._provider: WorkerId | None = None
        self._providers: set[WorkerId] = set()
        """All that are to be told when the transfer is over."""
        self._is_over = False

    def provided_by(self, worker: WorkerId) -> None:
        """This worker has the prefill half (now)."""
        self._provider = worker
        self._providers.add(worker)
        self._wake()

    async def take(self, message: KvReady | KvFailed) -> None:
        """News from prefill. What comes late is answered: its sender holds leases for nothing."""
        if self._is_over:
            if message.worker is not None:
                await self._tell_done({message.worker})
            return
        match message:
            case KvReady():
                if message.worker is not None:
                    self._provider = message.worker
                    self._providers.add(message.worker)
                    self._peers.hear(message.worker)
                self.progress.announce(message)
            case KvFailed():
                if message.worker is None or message.worker == self._provider:
                    self.progress.fail(message)
            case _:
                assert_never(message)
        self._wake()

    async def load(self, sequence: OpenSequence, leases: LeaseSet, fire: Callable[[HalfEvent], object]) -> str | None:
        """Load chunks as they are announced, until all are there (None), or the rest won't come (the reason).

        What is hot in the engine isn't loaded.
        """
        self._puller.skip(self._request_id, self.progress.hot(await sequence.hot()))
        while True:
            self._news.clear()
            step = next_step(self.progress)
            match step:
                case Pull():
                    fire(HalfEvent.ANNOUNCED)
                    num_loaded, lost = await self._puller.pull(self._request_id, step.chunks, sequence, leases)
                    self.progress.num_loaded += num_loaded
                    self.progress.lost = lost
                    fire(HalfEvent.LOADED)
                case Wait():
                    await self._wait()
                case Generate():
                    fire(HalfEvent.COMPLETE)
                    return None
                case Recompute():
                    fire(HalfEvent.GIVE_UP)
                    self._log.warning("prompt is computed here in part", reason=step.reason)
                    return step.reason
                case _:
                    assert_never(step)

    async def announced(self) -> str | None:
        """Wait until all chunks are (None), or the rest won't be (the reason). Nothing is loaded."""
        while len(self.progress.sources) < len(self.progress.chunks):
            if self.progress.given_up is not None:
                return self.progress.given_up
            self._news.clear()
            await self._wait()
        return None

    async def close(self) -> None:
        """Tell prefill that it may let go. Idempotent."""
        if not self._is_over:
            self._is_over = True
            await self._tell_done(self._providers)

    async def _wait(self) -> None:
        """Until there is news; gives up where none can be hoped for."""
        provider = self._provider
        if provider is None:
            await self._news.wait()
            return
        with self._peers.watching(provider) as watched:
            while not self._news.is_set():
                try:
                    async with asyncio.timeout(CHECK_S):
                        await self._news.wait()
                except TimeoutError:
                    reason = self._hopeless(provider, watched)
                    if reason is not None:
                        self.progress.given_up = reason
                        return

    def _hopeless(self, provider: WorkerId, watched: Watched) -> str | None:
        if is_lost(watched.silent_s, MEMBER_LOST_AFTER_S, self._config.resplit_grace_s):
            return f"prefill worker {provider} is lost, and no other has taken over"
        if time.monotonic() - self._news_s > self._config.kv_wait_s:
            return f"nothing came from prefill worker {provider} for {self._config.kv_wait_s:g} s"
        return None

    def _wake(self) -> None:
        self._news_s = time.monotonic()
        self._news.set()

    async def _tell_done(self, workers: set[WorkerId]) -> None:
        message = TransferDone(request_id=self._request_id, transfer_id=self._transfer_id)
        for worker in sorted(workers):
            try:
                await endpoint.announce(self._bus, subjects.split_prefill(worker), message)
            except BusError as error:
                self._log.warning("prefill can't be told that the transfer is over", worker=worker, error=str(error))
