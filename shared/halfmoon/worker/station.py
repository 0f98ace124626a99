"""What a worker stands on: its engine and its node's pool, started and stopped together."""

import asyncio
from typing import TypeVar

import structlog

from halfmoon.bus.endpoint import Endpoint, Envelope, serve
from halfmoon.bus.errors import BusError
from halfmoon.engine.contract import Engine, EngineError, EngineStats
from halfmoon.lifecycle import Runtime, StartupError
from halfmoon.models import ModelFolderError
from halfmoon.pool.arena import ArenaError
from halfmoon.pool.client import PoolClient
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import NodeId
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.orders import Forget, Forgotten
from halfmoon.schemas.splits import Role
from halfmoon.tasks import ended
from halfmoon.worker.cache_news import CacheNews, tell_cache
from halfmoon.worker.config import WorkerConfig
from halfmoon.worker.heartbeat import WorkerPulse
from halfmoon.worker.partners import Newcomer, roll_call, unfit
from halfmoon.worker.sequences import EngineCrashed, Sequences

W = TypeVar("W", bound=WorkerConfig)


class Station:
    """Its life:

    1. `start`: the model is loaded, the pool mapped, both fit each other, and others can work with this worker. From
       then on, what the engine's prefix cache holds is told.
    2. `stop`: the engine first, since it may touch the arena; then the pool, with what is leased from it. Idempotent.
    """

    def __init__(self, runtime: Runtime[W], engine: Engine, role: Role) -> None:
        config = runtime.config
        self.node = NodeId(config.node)
        self.engine = engine
        self.pool = PoolClient(runtime.bus, self.node, runtime.worker_id)
        self.sequences = Sequences(engine, self._crashed)
        self.pulse = WorkerPulse(
            worker=runtime.worker_id,
            role=role,
            node=self.node,
            started_ns=runtime.started_ns,
            max_requests=config.max_requests,
        )
        self._bus = runtime.bus
        self._telling: asyncio.Task[None] | None = None
        self._forgetting: Endpoint | None = None
        self._config = config
        self._fail = runtime.fail
        self._log: structlog.stdlib.BoundLogger = runtime.log
        self._is_started = False
        self._crash: EngineCrashed | None = None

    async def start(self) -> ModelCard:
        """Raises `StartupError`."""
        try:
            card = await self.engine.start(self.pulse.loading)
        except (EngineError, ModelFolderError, ValueError) as error:
            raise StartupError(str(error)) from error
        self._is_started = True
        await self._map_pool(card)
        self.pulse.loaded(card)
        await self._look_for_partners(card)
        news = CacheNews(self.pulse.worker, self.pulse.started_ns)
        self._telling = asyncio.create_task(tell_cache(self._bus, news, self.sequences, self._log), name="cache news")
        self._telling.add_done_callback(self._on_telling_end)
        self._forgetting = await serve(self._bus, subjects.forget(self.pulse.worker), Forget, self._forget)
        self.pulse.serving()
        self._log.info("engine ready", model=card.name, engine=card.engine, kv_tokens=self.engine.stats().total_tokens)
        return card

    async def stop(self) -> None:
        self._is_started = False
        telling, self._telling = self._telling, None
        if telling is not None:
            await ended(telling)
        forgetting, self._forgetting = self._forgetting, None
        if forgetting is not None:
            await forgetting.unsubscribe()
        await self.engine.stop()
        await self.pool.close()

    def stats(self) -> EngineStats | None:
        """None before the engine has started."""
        return self.engine.stats() if self._is_started else None

    async def _forget(self, message: Forget, envelope: Envelope) -> Forgotten:
        """A flush. At least what it selects is forgotten; what is needed of the rest comes back from the pool."""
        num_chunks = self.sequences.forget(message.order.selection)
        self.pulse.orders_seq = max(self.pulse.orders_seq, message.order.seq)
        self._log.info("prefix cache forgotten", seq=message.order.seq, num_chunks=num_chunks)
        return Forgotten(worker=self.pulse.worker, num_chunks=num_chunks)

    async def _look_for_partners(self, card: ModelCard) -> None:
        pulse = self.pulse
        newcomer = Newcomer(worker=pulse.worker, role=pulse.role, started_ns=pulse.started_ns, card=card)
        try:
            heard = await roll_call(self._bus, self._config.listen_first_s)
        except BusError as error:
            self._log.warning("not heard who serves this model already", error=str(error))
            return
        why = unfit(newcomer, heard)
        if why is not None and not self._config.allow_other_kv:
            raise StartupError(why)
        if why is not None:
            self._log.warning("no partner with the same KV yet", why=why)

    async def _map_pool(self, card: ModelCard) -> None:
        try:
            info = await self.pool.wait_ready(self._config.pool_start_timeout_s)
        except BusError as error:
            raise StartupError(
                f"the kv-tier of node {self.node!r} doesn't answer ({error}): start it, or set node to one that runs"
            ) from error
        except ArenaError as error:
            raise StartupError(f"the pool of node {self.node!r} can't be mapped: {error}") from error
        chunk_bytes = card.payload_bytes(card.chunk_tokens)
        if chunk_bytes > info.slot_bytes:
            raise StartupError(
                f"a chunk of {card.chunk_tokens} tokens of {card.name!r} has {chunk_bytes:,} bytes, the slots of "
                f"node {self.node!r} have {info.slot_bytes:,}: give its kv-tier the same model and chunk_tokens"
            )

    def _on_telling_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(f"the task {task.get_name()!r} failed: {error!r}")

    def _crashed(self, crash: EngineCrashed) -> None:
        if self._crash is None:
            self._crash = crash
            self._log.critical("the engine failed; this worker stops", operation=crash.operation, exc_info=crash.cause)
            self._fail(str(crash))
