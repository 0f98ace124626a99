"""The torch engine: the asyncio side of a model that computes step by step in a thread.

One task drives: it plans a step from what the sequences want, has the step thread run it, and hands out what came of
it. All state belongs to the event loop; threads get only what they need for one step or one copy. So there are no
locks, and whether a thread may still touch a sequence is known: it is in the step that runs, or is being copied.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from halfmoon.engine.checks import check_decode, check_load, check_sinks, check_spec
from halfmoon.engine.contract import (
    ChunkSink,
    ChunkWritten,
    EngineError,
    EngineStats,
    HotChanges,
    Sampled,
    SequenceClosed,
    SequenceSpec,
)
from halfmoon.engine.torch.config import TorchEngineConfig
from halfmoon.engine.torch.kv import PagedKV
from halfmoon.engine.torch.probe import check_pages
from halfmoon.engine.torch.runner import Runner, StepResult
from halfmoon.engine.torch.schedule import Part, Want, plan_step
from halfmoon.engine.torch.sequence import OpenSequence
from halfmoon.engine.torch.weights import load_model
from halfmoon.models import ModelFolder
from halfmoon.models.fingerprint import fingerprint
from halfmoon.schemas.ids import ModelName
from halfmoon.schemas.model import ModelCard

LAYOUT = "lktHd.v1"
_SMOOTHING = 0.2
"""Weight of the newest step in the running means of speed."""


class TorchEngine:
    """See `halfmoon.engine.contract.Engine`."""

    def __init__(self, config: TorchEngineConfig) -> None:
        self._config = config
        self._sequences: dict[str, OpenSequence] = {}
        self._step_thread = ThreadPoolExecutor(1, thread_name_prefix="engine-step")
        self._copy_thread = ThreadPoolExecutor(1, thread_name_prefix="engine-copy")
        self._wake = asyncio.Event()
        self._step_ended = asyncio.Condition()
        self._in_step: frozenset[str] = frozenset()
        self._driver: asyncio.Task[None] | None = None
        self._card: ModelCard | None = None
        self._kv: PagedKV | None = None
        self._failure: Exception | None = None
        self._num_steps = 0
        self._prefill_tokens_per_s: float | None = None
        self._decode_step_s: float | None = None

    @property
    def card(self) -> ModelCard:
        if self._card is None:
            raise EngineError("the engine has not been started")
        return self._card

    async def start(self, progress: Callable[[float], None] = lambda done: None) -> ModelCard:
        loop = asyncio.get_running_loop()

        def tell(done: float) -> None:
            loop.call_soon_threadsafe(progress, done)

        card, self._kv, runner = await loop.run_in_executor(self._step_thread, self._load, tell)
        self._card = card
        self._driver = asyncio.create_task(self._drive(runner), name="engine-driver")
        return card

    def open(self, spec: SequenceSpec) -> None:
        if self._failure is not None:
            raise EngineError(f"the engine has failed: {self._failure}")
        if spec.seq_id in self._sequences:
            raise ValueError(f"sequence {spec.seq_id} is open already")
        kv = self._need_kv()
        check_spec(spec, kv.total_tokens)
        extent = kv.take(spec.max_tokens)
        self._sequences[spec.seq_id] = OpenSequence(spec, extent, list(spec.tokens))

    async def hot(self, seq_id: str) -> int:
        """Always 0: a sequence's blocks are its own."""
        self._get(seq_id)
        return 0

    def hot_changes(self) -> HotChanges:
        return HotChanges()

    def forget(self, roots: Collection[bytes] | None = None) -> int:
        return 0

    async def load(self, seq_id: str, index: int, num_tokens: int, payload: memoryview) -> None:
        sequence = self._get(seq_id)
        check_load(self.card, len(sequence.tokens), index, num_tokens, payload)
        start = index * self._config.chunk_tokens
        kv = self._need_kv()
        copy = asyncio.get_running_loop().run_in_executor(
            self._copy_thread, kv.load, sequence.extent, start, num_tokens, payload
        )
        sequence.loads.add(copy)
        try:
            # Shielded: a copy can't be stopped half-way, and `close` waits for it.
            await asyncio.shield(copy)
        finally:
            if copy.done():
                sequence.loads.discard(copy)
        if sequence.is_closed:
            raise SequenceClosed(f"sequence {seq_id} was closed while a chunk was loaded")

    async def prefill(
        self, seq_id: str, start: int, stop: int, sinks: Sequence[ChunkSink]
    ) -> AsyncIterator[ChunkWritten]:
        sequence = self._get_idle(seq_id)
        check_sinks(self.card, len(sequence.tokens), start, stop, sinks)
        sequence.begin_prefill(start, stop, list(sinks))
        self._wake.set()
        while (item := await sequence.outbox.get()) is not None:
            if isinstance(item, Exception):
                raise item
            assert isinstance(item, ChunkWritten)
            yield item

    async def decode(self, seq_id: str, num_computed: int) -> AsyncIterator[Sampled]:
        sequence = self._get_idle(seq_id)
        sequence.begin_decode(num_computed, check_decode(sequence.spec, num_computed))
        self._wake.set()
        while (item := await sequence.outbox.get()) is not None:
            if isinstance(item, Exception):
                raise item
            assert isinstance(item, Sampled)
            yield item

    async def close(self, seq_id: str) -> None:
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            return
        if sequence.closing is None:
            sequence.end(SequenceClosed(f"sequence {seq_id} was closed"))
            sequence.closing = asyncio.create_task(self._release(sequence), name=f"engine-close {seq_id}")
        # Shielded: who waits may be cancelled, the blocks are given back all the same.
        await asyncio.shield(sequence.closing)

    def stats(self) -> EngineStats:
        wants = [sequence for sequence in self._sequences.values() if sequence.want() is not None]
        return EngineStats(
            running=len(wants),
            waiting=len(self._sequences) - len(wants),
            free_tokens=0 if self._kv is None else self._kv.free_tokens,
            total_tokens=0 if self._kv is None else self._kv.total_tokens,
            steps=self._num_steps,
            prefill_tokens_per_s=self._prefill_tokens_per_s,
            decode_step_s=self._decode_step_s,
        )

    async def stop(self) -> None:
        for seq_id in list(self._sequences):
            await self.close(seq_id)
        if self._driver is not None:
            self._driver.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._driver
            self._driver = None
        self._kv = None
        for thread in (self._step_thread, self._copy_thread):
            await asyncio.to_thread(thread.shutdown)

    def _load(self, progress: Callable[[float], None]) -> tuple[ModelCard, PagedKV, Runner]:
        config = self._config
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        device, dtype = config.resolve_device(), config.resolve_dtype()
        folder = ModelFolder.open(config.model)
        model = load_model(folder, dtype=dtype, device=device, progress=progress)
        geometry = folder.geometry
        kv = PagedKV(
            num_layers=geometry.num_layers,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            num_tokens=config.kv_tokens,
            block_tokens=config.block_tokens,
            dtype=dtype,
            device=device,
        )
        check_pages(model, geometry, dtype, device)
        card = ModelCard(
            name=ModelName(config.name),
            engine="torch",
            fingerprint=fingerprint(folder),
            kv_dtype=str(dtype).removeprefix("torch."),
            layout=LAYOUT,
            kv_bytes_per_token=kv.bytes_per_token,
            chunk_tokens=config.chunk_tokens,
            max_model_tokens=min(geometry.max_model_tokens, kv.total_tokens),
            vocab_size=geometry.vocab_size,
        )
        progress(1.0)
        return card, kv, Runner(model, kv, device)

    async def _drive(self, runner: Runner) -> None:
        try:
            while True:
                wants = [want for sequence in self._sequences.values() if (want := sequence.want()) is not None]
                if wants:
                    await self._step(runner, wants)
                else:
                    self._wake.clear()
                    await self._wake.wait()
        except Exception as error:  # whatever the model raises ends this engine, and is told to all who wait
            self._fail(error)

    async def _step(self, runner: Runner, wants: Sequence[Want]) -> None:
        config = self._config
        parts = plan_step(
            wants,
            prefill_step_tokens=config.prefill_step_tokens,
            mixed_step_tokens=config.mixed_step_tokens,
            max_batch=config.max_batch,
        )
        rows = [self._sequences[part.seq_id].row(part, config.chunk_tokens) for part in parts]
        self._in_step = frozenset(part.seq_id for part in parts)
        step = asyncio.get_running_loop().run_in_executor(self._step_thread, runner.run, rows)
        try:
            result = await asyncio.shield(step)
            for part, row, drawn in zip(parts, rows, result.drawn, strict=True):
                sequence = self._sequences[part.seq_id]
                if not sequence.is_closed:
                    sequence.advance(part, row, drawn, result)
            self._measure(parts, result)
        except asyncio.CancelledError:
            await asyncio.wait((step,))  # the thread can't be stopped half-way
            raise
        finally:
            self._in_step = frozenset()
            async with self._step_ended:
                self._step_ended.notify_all()

    def _fail(self, error: Exception) -> None:
        self._failure = error
        for sequence in self._sequences.values():
            if not sequence.is_closed:
                sequence.end(EngineError(f"a step of the engine failed: {type(error).__name__}: {error}"))

    def _measure(self, parts: Sequence[Part], result: StepResult) -> None:
        self._num_steps += 1
        num_tokens = sum(part.stop - part.start for part in parts)
        if num_tokens == len(parts):
            self._decode_step_s = _smooth(self._decode_step_s, result.compute_s)
        elif result.compute_s > 0:
            self._prefill_tokens_per_s = _smooth(self._prefill_tokens_per_s, num_tokens / result.compute_s)

    async def _release(self, sequence: OpenSequence) -> None:
        await self._until_untouched(sequence)
        del self._sequences[sequence.spec.seq_id]
        self._need_kv().give_back(sequence.extent)

    async def _until_untouched(self, sequence: OpenSequence) -> None:
        """Until no thread can touch the sequence's blocks, sinks or payloads."""
        async with self._step_ended:
            await self._step_ended.wait_for(lambda: sequence.spec.seq_id not in self._in_step)
        while sequence.loads:
            await asyncio.wait(sequence.loads)
            sequence.loads = {load for load in sequence.loads if not load.done()}

    def _get(self, seq_id: str) -> OpenSequence:
        sequence = self._sequences.get(seq_id)
        if sequence is None or sequence.is_closed:
            raise SequenceClosed(f"sequence {seq_id} is not open")
        return sequence

    def _get_idle(self, seq_id: str) -> OpenSequence:
        sequence = self._get(seq_id)
        if sequence.goal is not None:
            raise ValueError(f"sequence {seq_id} is being computed already")
        return sequence

    def _need_kv(self) -> PagedKV:
        if self._kv is None:
            raise EngineError("the engine has not been started, or was stopped")
        return self._kv


def _smooth(mean: float | None, newest: float) -> float:
    return newest if mean is None else (1 - _SMOOTHING) * mean + _SMOOTHING * newest
