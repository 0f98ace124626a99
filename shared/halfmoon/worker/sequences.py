"""The engine's sequences: who waits for room, in which order; and which exceptions mean that the engine is broken."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self, TypeVar

from halfmoon.engine.contract import (
    ChunkSink,
    ChunkWritten,
    Engine,
    EngineError,
    EngineFull,
    EngineStats,
    HotChanges,
    Sampled,
    SequenceSpec,
)
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.orders import Selection
from halfmoon.worker.line import Line
from halfmoon.worker.makers import Makers

T = TypeVar("T")


class EngineCrashed(Exception):
    """The engine raised what its contract doesn't know: nothing that it holds can be trusted any more."""

    def __init__(self, operation: str, cause: BaseException) -> None:
        super().__init__(f"the engine failed in {operation}: {type(cause).__name__}: {cause}")
        self.operation = operation
        self.cause = cause


class _Guard:
    """Turns an exception that the contract doesn't know into `EngineCrashed`, at one place."""

    def __init__(self, operation: str, on_crash: Callable[[EngineCrashed], None]) -> None:
        self._operation = operation
        self._on_crash = on_crash

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if not isinstance(error, Exception) or isinstance(error, EngineError | ValueError | EngineCrashed):
            return
        crash = EngineCrashed(self._operation, error)
        self._on_crash(crash)
        raise crash from error


class Sequences:
    """An engine, entered through one gate: sequences that find no room wait in line."""

    def __init__(self, engine: Engine, on_crash: Callable[[EngineCrashed], None]) -> None:
        self._engine = engine
        self._on_crash = on_crash
        self._line = Line()
        self.makers = Makers()

    @property
    def card(self) -> ModelCard:
        return self._engine.card

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def hot_changes(self) -> HotChanges:
        """For one caller. Raises `EngineCrashed`, as every entry into the engine may."""
        with _Guard("hot_changes", self._on_crash):
            return self._engine.hot_changes()

    def forget(self, selection: Selection) -> int:
        """Let new sequences find nothing in the engine's prefix cache that may be selected; how many chunks were known
        to be in it that are forgotten."""
        with _Guard("forget", self._on_crash):
            return self._engine.forget(self.makers.roots_of(selection))

    @asynccontextmanager
    async def sequence(self, spec: SequenceSpec, *, priority: int = 0) -> AsyncIterator["OpenSequence"]:
        """A claimed sequence, closed at the end whatever happens. The caller bounds the wait for room.

        Raises ValueError where the spec can never fit.
        """
        await self._line.enter(lambda: self._open(spec), priority=priority)
        try:
            yield OpenSequence(self._engine, spec, self._on_crash)
        finally:
            try:
                with _Guard("close", self._on_crash):
                    await self._engine.close(spec.seq_id)
            finally:
                self._line.wake()

    def _open(self, spec: SequenceSpec) -> bool:
        try:
            with _Guard("open", self._on_crash):
                self._engine.open(spec)
        except EngineFull:
            return False
        return True


class OpenSequence:
    """One claimed sequence. Its methods are the engine's, without the id."""

    def __init__(self, engine: Engine, spec: SequenceSpec, on_crash: Callable[[EngineCrashed], None]) -> None:
        self._engine = engine
        self._on_crash = on_crash
        self.spec = spec

    async def hot(self) -> int:
        """Positions `[0, n)` that needn't be loaded."""
        with _Guard("hot", self._on_crash):
            return await self._engine.hot(self.spec.seq_id)

    async def load(self, index: int, num_tokens: int, payload: memoryview) -> None:
        with _Guard("load", self._on_crash):
            await self._engine.load(self.spec.seq_id, index, num_tokens, payload)

    def prefill(self, start: int, stop: int, sinks: Sequence[ChunkSink]) -> AsyncGenerator[ChunkWritten]:
        """To be iterated under `aclosing`, as `decode` is."""
        return self._guarded("prefill", lambda: self._engine.prefill(self.spec.seq_id, start, stop, sinks))

    def decode(self, num_computed: int) -> AsyncGenerator[Sampled]:
        return self._guarded("decode", lambda: self._engine.decode(self.spec.seq_id, num_computed))

    async def _guarded(self, operation: str, iterate: Callable[[], AsyncIterator[T]]) -> AsyncGenerator[T]:
        with _Guard(operation, self._on_crash):
            iterator = iterate()
            try:
                async for item in iterator:
                    yield item
            finally:
                if isinstance(iterator, AsyncGenerator):
                    await iterator.aclose()
