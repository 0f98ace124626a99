"""vLLM's processes: started, watched, and ended with the worker that they serve."""

import asyncio
import contextlib
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from halfmoon.engine.contract import EngineError
from halfmoon.engine.vllm.arguments import engine_arguments, prepare_environment
from halfmoon.engine.vllm.cache_events import HotChunks
from halfmoon.engine.vllm.channel import Channel
from halfmoon.engine.vllm.config import VllmEngineConfig
from halfmoon.engine.vllm.messages import Ready, Report
from halfmoon.engine.vllm.staging import Staging
from halfmoon.models import ModelFolder

_POLL_S = 0.1
_READY_S = 60.0
_STOP_S = 10.0


class EngineLost(Exception):
    """A process of vLLM's has died. What it held is gone, and this engine with it."""


class VllmProcesses:
    """1. `start` returns when every rank is ready. 2. `llm`, `channel` and `staging` serve. 3. `stop`, idempotent."""

    def __init__(self, config: VllmEngineConfig, hot: HotChunks) -> None:
        self._config = config
        self._hot = hot
        self._undo = contextlib.AsyncExitStack()
        self._llm: Any = None
        self._channel: Channel | None = None
        self._staging: Staging | None = None
        self.is_lost = False

    @property
    def llm(self) -> Any:
        """vLLM's `AsyncLLM`. Raises `EngineError` before `start` and after `stop`; `EngineLost`."""
        if self._llm is None:
            raise EngineError("the engine has not been started, or was stopped")
        if self.is_lost or self._llm.errored:
            raise EngineLost("a process of vLLM's has died")
        return self._llm

    @property
    def channel(self) -> Channel:
        if self._channel is None:
            raise EngineError("the engine has not been started, or was stopped")
        return self._channel

    @property
    def staging(self) -> Staging:
        if self._staging is None:
            raise EngineError("the engine has not been started, or was stopped")
        return self._staging

    async def start(self, folder: ModelFolder, take: Callable[[Report], None], lost: Callable[[], None]) -> Ready:
        """What the first rank says of itself. `take` is told what all ranks report, `lost` that one has died.

        Raises `EngineError`. Cancelled, it leaves no process behind.
        """
        try:
            return await self._start(folder, take, lost)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        await self._undo.aclose()

    async def _start(self, folder: ModelFolder, take: Callable[[Report], None], lost: Callable[[], None]) -> Ready:
        def rank_gone() -> None:
            if self._llm is not None:  # Otherwise it was told to go.
                self.is_lost = True
                lost()

        prepare_environment(self._config)
        private = Path(self._undo.enter_context(tempfile.TemporaryDirectory(prefix="halfmoon-vllm-")))
        self._staging = Staging()
        self._undo.callback(self._staging.close)
        self._channel = channel = Channel(self._config.tensor_parallel, take, rank_gone)
        await channel.open(private / "orders")
        self._undo.push_async_callback(channel.close)
        events = f"ipc://{private / 'events'}"
        self._follow(events)
        extra = {"socket": str(private / "orders"), "chunk_tokens": self._config.chunk_tokens}
        starting = asyncio.create_task(asyncio.to_thread(self._start_llm, folder, extra, events))
        try:
            self._llm = await asyncio.shield(starting)
        except asyncio.CancelledError:
            await _give_up(starting)
            raise
        self._undo.push_async_callback(self._stop_llm)
        async with asyncio.timeout(_READY_S):
            [first, *_] = await channel.ready()
        return first

    def _follow(self, events: str) -> None:
        """What is hot, from before the first event."""
        from halfmoon.engine.vllm.event_reader import EventReader

        reader = EventReader(events, self._hot)
        reader.start()
        self._undo.push_async_callback(reader.close)

    def _start_llm(self, folder: ModelFolder, extra: dict[str, Any], events: str) -> Any:
        """In a thread: vLLM blocks until its processes are up, which takes half a minute."""
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = engine_arguments(self._config, folder, extra, events)
        try:
            return AsyncLLM.from_engine_args(arguments)
        except Exception as error:
            raise EngineError(f"vLLM doesn't start: {type(error).__name__}: {error}") from error

    async def _stop_llm(self) -> None:
        """Its processes end by themselves, in time; before them the task that would report their end as a failure."""
        llm, self._llm = self._llm, None
        if llm.output_handler is not None:
            llm.output_handler.cancel()
            await asyncio.gather(llm.output_handler, return_exceptions=True)
            llm.output_handler = None
        await asyncio.to_thread(llm.shutdown, _STOP_S)
        llm.shutdown = lambda: None  # Its finalizer would try again when the interpreter ends, and fail, and say so.


async def _give_up(starting: "asyncio.Task[Any]") -> None:
    """End a start that is under way. Its thread can't be stopped; without the processes that it waits for, it ends."""
    while not starting.done():
        for process in multiprocessing.active_children():
            process.kill()
        await asyncio.wait((starting,), timeout=_POLL_S)
    if starting.exception() is None:
        await asyncio.to_thread(starting.result().shutdown, _STOP_S)
