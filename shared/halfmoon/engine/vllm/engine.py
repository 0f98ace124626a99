"""The vLLM engine: the contract's calls into vLLM's requests, and its connector's reports back into answers.

A sequence is submitted to vLLM when first something is asked of it: what is hot, a load, its prompt, its tokens. If
there is anything to load, vLLM gives it blocks and waits; chunks are copied in as they come; `Filled` ends the wait.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any

from halfmoon.engine.checks import check_decode, check_load, check_sinks, check_spec
from halfmoon.engine.contract import (
    ChunkSink,
    ChunkWritten,
    EngineError,
    EngineFull,
    EngineStats,
    HotChanges,
    LoadFailed,
    Sampled,
    SequenceClosed,
    SequenceSpec,
)
from halfmoon.engine.vllm.cache_events import HotChunks
from halfmoon.engine.vllm.config import VllmEngineConfig
from halfmoon.engine.vllm.messages import (
    Bound,
    Drop,
    Dropped,
    Filled,
    Load,
    Loaded,
    Ready,
    Report,
    SinkPlace,
    Sinks,
    Written,
)
from halfmoon.engine.vllm.processes import EngineLost, VllmProcesses
from halfmoon.engine.vllm.requests import Pace, sampled_tokens, sampling_params
from halfmoon.engine.vllm.sequence import OpenSequence, PendingSink
from halfmoon.engine.vllm.versions import check_version
from halfmoon.models import ModelFolder
from halfmoon.models.fingerprint import fingerprint
from halfmoon.schemas.ids import ModelName
from halfmoon.schemas.model import ModelCard

_DROP_S = 60.0
"""A step of a long prompt on a slow machine is over by then."""


class VllmEngine:
    """See `halfmoon.engine.contract.Engine`."""

    def __init__(self, config: VllmEngineConfig) -> None:
        self._config = config
        self._sequences: dict[str, OpenSequence] = {}
        self._by_number: dict[int, OpenSequence] = {}
        self._numbers = itertools.count(1)
        self._load_numbers = itertools.count(1)
        self._hot = HotChunks(config.chunk_tokens)
        self._processes = VllmProcesses(config, self._hot)
        self._pace = Pace()
        self._card: ModelCard | None = None
        self._num_blocks = 0
        self._num_free_blocks = 0

    @property
    def card(self) -> ModelCard:
        if self._card is None:
            raise EngineError("the engine has not been started")
        return self._card

    async def start(self, progress: Callable[[float], None] = lambda done: None) -> ModelCard:
        config = self._config
        check_version()
        folder = ModelFolder.open(config.model)
        progress(0.02)
        identity = await asyncio.to_thread(fingerprint, folder)
        progress(0.1)
        ready = await self._processes.start(folder, self._take, self._lost)
        vllm_config = self._processes.llm.vllm_config
        block_tokens = vllm_config.cache_config.block_size
        self._num_blocks = self._num_free_blocks = ready.num_blocks - 1
        max_len = vllm_config.model_config.max_model_len
        self._card = ModelCard(
            name=ModelName(config.name),
            engine="vllm",
            fingerprint=identity,
            kv_dtype=ready.kv_dtype,
            layout=ready.layout,
            kv_bytes_per_token=config.tensor_parallel * ready.block_bytes // block_tokens,
            chunk_tokens=config.chunk_tokens,
            max_model_tokens=min(max_len, self._num_blocks * block_tokens),
            vocab_size=folder.geometry.vocab_size,
            block_tokens=block_tokens,
        )
        progress(1.0)
        return self._card

    def open(self, spec: SequenceSpec) -> None:
        _ = self._processes.llm  # Raises where it isn't alive.
        if spec.seq_id in self._sequences:
            raise ValueError(f"sequence {spec.seq_id} is open already")
        block_tokens = self.card.block_tokens
        check_spec(spec, self._num_blocks * block_tokens)
        reserve = self._config.completion_reserve_tokens
        claimed = spec.max_tokens if reserve is None else min(spec.max_tokens, len(spec.tokens) + reserve)
        num_blocks = -(-claimed // block_tokens)
        if num_blocks > self._num_free_blocks:
            raise EngineFull(claimed, self._num_free_blocks * block_tokens)
        self._num_free_blocks -= num_blocks
        bound: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        sequence = OpenSequence(spec, next(self._numbers), num_blocks, bound)
        self._sequences[spec.seq_id] = sequence
        self._by_number[sequence.number] = sequence

    async def hot(self, seq_id: str) -> int:
        sequence = self._get(seq_id)
        num_loadable = self._num_loadable(sequence)
        if sequence.request is None:
            if num_loadable == 0 and sequence.spec.has_sinks:
                return 0  # vLLM would begin to compute; where the chunks go is told with `prefill`.
            self._submit(sequence, num_loadable, has_sinks=sequence.spec.has_sinks)
        return await asyncio.shield(sequence.bound)

    def hot_changes(self) -> HotChanges:
        return self._hot.take_changes()

    def forget(self, roots: Collection[bytes] | None = None) -> int:
        return self._hot.forget(roots)

    async def load(self, seq_id: str, index: int, num_tokens: int, payload: memoryview) -> None:
        sequence = self._get(seq_id)
        card = self.card
        check_load(card, len(sequence.spec.tokens), index, num_tokens, payload)
        end = index * card.chunk_tokens + num_tokens
        if end > (num_loadable := self._num_loadable(sequence)):
            raise ValueError(f"chunk {index} ends at {end}, the sequence was opened to load {num_loadable} tokens")
        if end <= await self.hot(seq_id):
            return
        if sequence.is_closed:
            raise SequenceClosed(f"sequence {seq_id} was closed before a chunk was loaded")
        staged = self._processes.staging.of(payload)
        sequence.staged.append(staged)
        number = next(self._load_numbers)
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        sequence.loads[number] = done
        self._processes.channel.send(Load(sequence.number, number, index, num_tokens, staged.place))
        # Shielded: a copy can't be called back, and `close` waits for it.
        error = await asyncio.shield(done)
        staged.release()
        if error:
            raise LoadFailed(index, error)

    async def prefill(
        self, seq_id: str, start: int, stop: int, sinks: Sequence[ChunkSink]
    ) -> AsyncIterator[ChunkWritten]:
        sequence = self._get_idle(seq_id)
        check_sinks(self.card, len(sequence.spec.tokens), start, stop, sinks)
        sequence.is_running = True
        try:
            self._send_sinks(sequence, sinks)
            if sequence.request is None:
                self._submit(sequence, 0, has_sinks=True)
            else:
                self._processes.channel.send(Filled(sequence.number, start))
            for _ in sinks:
                item = await sequence.written.get()
                if isinstance(item, Exception):
                    raise item
                self._pace.computed(item, self.card.chunk_tokens)
                yield item
        finally:
            sequence.is_running = False

    async def decode(self, seq_id: str, num_computed: int) -> AsyncIterator[Sampled]:
        sequence = self._get_idle(seq_id)
        spec = check_decode(sequence.spec, num_computed)
        sequence.is_running = True
        try:
            if sequence.request is None:
                self._submit(sequence, 0, has_sinks=False)
            else:
                is_all = num_computed >= len(sequence.spec.tokens) - 1
                self._processes.channel.send(
                    Filled(sequence.number, len(sequence.spec.tokens) if is_all else num_computed)
                )
            while (item := await sequence.outbox.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                self._pace.sampled(seq_id, is_first=item.position == spec.num_known)
                yield item
        finally:
            sequence.is_running = False

    async def close(self, seq_id: str) -> None:
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            return
        if sequence.closing is None:
            sequence.closing = asyncio.create_task(self._release(sequence), name=f"vllm-close {seq_id}")
            sequence.end(SequenceClosed(f"sequence {seq_id} was closed"))
        # Shielded: who waits may be cancelled, the blocks are given back all the same.
        await asyncio.shield(sequence.closing)

    def stats(self) -> EngineStats:
        block_tokens = self._card.block_tokens if self._card is not None else 0
        running = sum(sequence.is_running for sequence in self._sequences.values())
        return EngineStats(
            running=running,
            waiting=len(self._sequences) - running,
            free_tokens=self._num_free_blocks * block_tokens,
            total_tokens=self._num_blocks * block_tokens,
            steps=self._pace.num_steps,
            prefill_tokens_per_s=self._pace.prefill_tokens_per_s,
            decode_step_s=self._pace.decode_step_s,
        )

    async def stop(self) -> None:
        for seq_id in list(self._sequences):
            await self.close(seq_id)
        self._num_blocks = self._num_free_blocks = 0
        await self._processes.stop()

    def _submit(self, sequence: OpenSequence, num_loadable: int, *, has_sinks: bool) -> None:
        """Tell vLLM of the sequence, once."""
        params = sampling_params(sequence.spec, sequence.number, num_loadable, has_sinks=has_sinks)
        sequence.request = asyncio.create_task(
            self._generate(sequence, params), name=f"vllm-request {sequence.spec.seq_id}"
        )

    async def _generate(self, sequence: OpenSequence, params: Any) -> None:
        spec = sequence.spec
        prompt: dict[str, Any] = {"prompt_token_ids": list(spec.tokens)}
        if spec.root:
            prompt["cache_salt"] = self._hot.salt(spec.root)
        num_known = spec.decode.num_known if spec.decode is not None else 0
        try:
            async with contextlib.aclosing(
                sampled_tokens(self._processes.llm, prompt, params, f"{sequence.number}", num_known)
            ) as tokens:
                async for token in tokens:
                    sequence.outbox.put_nowait(token)
            sequence.outbox.put_nowait(None)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            lost = EngineLost(f"vLLM failed: {type(error).__name__}: {error}")
            sequence.end(lost)

    def _send_sinks(self, sequence: OpenSequence, sinks: Sequence[ChunkSink]) -> None:
        places: list[SinkPlace] = []
        for sink in sinks:
            staged = self._processes.staging.of(sink.payload, is_sink=True)
            sequence.staged.append(staged)
            sequence.sinks[sink.index] = PendingSink(sink, staged)
            places.append(SinkPlace(sink.index, sink.num_tokens, staged.place))
        self._processes.channel.send(Sinks(sequence.number, tuple(places)))

    async def _release(self, sequence: OpenSequence) -> None:
        if sequence.request is not None:
            sequence.request.cancel()
            await asyncio.wait((sequence.request,))
            if not self._processes.is_lost:
                self._processes.channel.send(Drop(sequence.number))
                async with asyncio.timeout(_DROP_S):
                    await sequence.dropped.wait()
        sequence.release()
        self._pace.forget(sequence.spec.seq_id)
        del self._sequences[sequence.spec.seq_id], self._by_number[sequence.number]
        self._num_free_blocks += sequence.num_blocks

    def _take(self, report: Report) -> None:
        """A report that all ranks have made."""
        sequence = None if isinstance(report, Ready) else self._by_number.get(report.seq)
        if sequence is None:
            return
        match report:
            case Bound():
                if not sequence.bound.done():
                    sequence.bound.set_result(report.num_hot)
            case Loaded():
                if (load := sequence.loads.pop(report.load, None)) is not None and not load.done():
                    load.set_result(report.error)
            case Written():
                if report.error:
                    sequence.written.put_nowait(EngineError(f"chunk {report.index} was not written: {report.error}"))
                else:
                    sequence.take_written(report)
            case Dropped():
                sequence.dropped.set()
            case Ready():
                return

    def _lost(self) -> None:
        for sequence in self._sequences.values():
            sequence.dropped.set()
            sequence.end(EngineLost("a process of vLLM's has died"))

    def _num_loadable(self, sequence: OpenSequence) -> int:
        given = sequence.spec.num_loadable
        return len(sequence.spec.tokens) if given is None else given

    def _get(self, seq_id: str) -> OpenSequence:
        sequence = self._sequences.get(seq_id)
        if sequence is None or sequence.is_closed:
            raise SequenceClosed(f"sequence {seq_id} is not open")
        return sequence

    def _get_idle(self, seq_id: str) -> OpenSequence:
        sequence = self._get(seq_id)
        if sequence.is_running:
            raise ValueError(f"sequence {seq_id} is being computed already")
        return sequence
