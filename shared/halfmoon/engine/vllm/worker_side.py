"""The connector in a rank's process: binds orders to blocks, has them copied, and reports when that is done.

Three threads meet here: vLLM's (a step begins and ends), one that reads orders from the socket, and one that copies.
Copies are made one after the other, in the order in which they were asked for; so an order behind them all
(`Drop`, `fence`) is reached when nothing before it touches memory any more.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

import torch

from halfmoon.engine.vllm.copier import BlockCopier
from halfmoon.engine.vllm.messages import (
    Bound,
    Drop,
    Dropped,
    Filled,
    Load,
    Loaded,
    Order,
    Report,
    SinkPlace,
    Sinks,
    Written,
)
from halfmoon.engine.vllm.metadata import Binding, Progress, StepMetadata

_PAUSE_S = 0.005
"""A step without work lasts this long, unless something ends before. It holds up new requests as long, at most."""
_MAX_UNBOUND = 4096
"""Dropped sequences remembered, that vLLM may or may not bind yet."""


@dataclass(slots=True)
class _Sequence:
    seq: int
    binding: Binding | None = None
    waiting: list[Load] = field(default_factory=list)
    """Loads that came before the blocks."""
    num_copies: int = 0
    """Asked for and not done."""
    filled: int | None = None
    failed_at: int | None = None
    """First position of a load that failed."""
    is_load_reported: bool = False
    sinks: dict[int, SinkPlace] = field(default_factory=dict)
    """Not asked to be copied yet, by chunk index."""
    have_sinks_come: bool = False
    steps: list[tuple[int, int]] = field(default_factory=list)
    """For each step, the position that it reached and the time at which it began."""
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    computed: "torch.cuda.Event | None" = None
    """On a GPU, the moment at which `[0, num_computed)` is."""
    is_dropped: bool = False
    is_kept: bool = False
    """vLLM keeps the blocks of the finished request until it is told that they have been copied."""
    is_finished: bool = False

    @property
    def is_loading(self) -> bool:
        return self.binding is not None and self.binding.is_loading and not self.is_load_reported

    @property
    def has_ended(self) -> bool:
        return self.has_load_ended or self.have_copies_ended

    @property
    def has_load_ended(self) -> bool:
        """And vLLM hasn't been told of it."""
        return self.is_loading and self.num_copies == 0 and (self.is_dropped or self.filled is not None)

    @property
    def have_copies_ended(self) -> bool:
        """Nothing is left to copy, all came and was done, or nobody wants it any more; and vLLM waits to be told."""
        is_done = self.is_dropped or (self.have_sinks_come and not self.sinks)
        return self.is_kept and self.num_copies == 0 and is_done


class WorkerSide:
    """All public methods may be called from any thread; `begin_step`, `end_step` and `take_results` from vLLM's."""

    def __init__(
        self,
        copier: BlockCopier,
        send: Callable[[Report], None],
        *,
        chunk_tokens: int,
        block_tokens: int,
    ) -> None:
        self._copier = copier
        self._send = send
        self._chunk_tokens = chunk_tokens
        self._block_tokens = block_tokens
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        """Something may have ended that vLLM waits for."""
        self._sequences: dict[int, _Sequence] = {}
        self._by_request: dict[str, _Sequence] = {}
        self._invalid_blocks: set[int] = set()
        self._step_started_ns = 0
        self._copies: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._copy, name="halfmoon-copy", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Make no more copies; returns when the last one is over. Idempotent."""
        self._copies.put(None)
        self._thread.join()

    # From the socket.

    def take(self, order: Order) -> None:
        with self._lock:
            sequence = self._sequences.setdefault(order.seq, _Sequence(order.seq))
            match order:
                case Load():
                    if sequence.binding is None:
                        sequence.waiting.append(order)
                    else:
                        self._load(sequence, sequence.binding, order)
                case Sinks():
                    sequence.sinks.update({sink.index: sink for sink in order.sinks})
                    sequence.have_sinks_come = True
                    if sequence.steps:
                        self._save_computed(sequence)
                case Filled():
                    sequence.filled = order.num_tokens
                    self._news.notify()
                case Drop():
                    self._drop(sequence)
                case _:
                    assert_never(order)

    # From vLLM's steps.

    def begin_step(self, metadata: StepMetadata) -> None:
        """Before the model runs: bind new requests, so that their loads go on beside it."""
        with self._lock:
            self._step_started_ns = time.time_ns()
            for binding in metadata.bindings:
                self._bind(binding)
            for request_id in metadata.kept:
                if (sequence := self._by_request.get(request_id)) is not None:
                    sequence.is_kept = True

    def end_step(self, metadata: StepMetadata) -> None:
        """The model has computed (on a GPU: was told to compute) this step: copy what is complete now."""
        with self._lock:
            computed = self._record() if metadata.progress else None
            for progress in metadata.progress:
                sequence = self._by_request.get(progress.request_id)
                if sequence is not None:
                    sequence.computed = computed
                    self._advance(sequence, progress)
            if metadata.is_empty and not any(each.has_ended for each in self._by_request.values()):
                # vLLM would ask again at once, and keep a core busy with asking.
                self._news.wait(_PAUSE_S)

    def take_results(self, finished: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose kept blocks may be freed, and requests whose load has ended. Each is named once."""
        with self._lock:
            for request_id in finished:
                if (sequence := self._by_request.get(request_id)) is not None:
                    sequence.is_finished = True
            copied: set[str] = set()
            loaded: set[str] = set()
            for request_id, sequence in list(self._by_request.items()):
                if sequence.has_load_ended:
                    self._end_load(sequence)
                    loaded.add(request_id)
                if sequence.have_copies_ended:
                    sequence.is_kept = False
                    copied.add(request_id)
                self._forget(sequence)
            return copied, loaded

    def take_invalid_blocks(self) -> set[int]:
        """Blocks that were to be loaded and weren't, of the loads that ended in this step."""
        with self._lock:
            invalid, self._invalid_blocks = self._invalid_blocks, set()
            return invalid

    def fence(self) -> None:
        """Wait until all copies that were asked for are done: blocks are about to be given to other requests."""
        done = threading.Event()
        self._copies.put(done.set)
        done.wait()

    # Under the lock.

    def _bind(self, binding: Binding) -> None:
        sequence = self._sequences.setdefault(binding.seq, _Sequence(binding.seq))
        sequence.binding = binding
        sequence.block_ids = binding.block_ids
        sequence.num_computed = binding.num_hot
        self._by_request[binding.request_id] = sequence
        waiting, sequence.waiting = sequence.waiting, []
        for order in waiting:
            self._load(sequence, binding, order)
        self._send(Bound(binding.seq, binding.num_hot))

    def _load(self, sequence: _Sequence, binding: Binding, order: Load) -> None:
        start = order.index * self._chunk_tokens
        first = start // self._block_tokens
        num_blocks = -(-order.num_tokens // self._block_tokens)
        # What is hot is shared with others that may be reading it now.
        skip = min(num_blocks, max(0, binding.num_hot // self._block_tokens - first))
        block_ids = binding.block_ids[first + skip : first + num_blocks]
        sequence.num_copies += 1

        def copy() -> None:
            error = ""
            if not sequence.is_dropped and binding.is_loading:
                try:
                    self._copier.load(order.place, num_blocks, skip, block_ids)
                except (OSError, RuntimeError) as failure:
                    error = f"{type(failure).__name__}: {failure}"
            with self._lock:
                sequence.num_copies -= 1
                self._news.notify()
                if error:
                    sequence.failed_at = start if sequence.failed_at is None else min(start, sequence.failed_at)
            self._send(Loaded(order.seq, order.load, error))

        self._copies.put(copy)

    def _advance(self, sequence: _Sequence, progress: Progress) -> None:
        sequence.num_computed = progress.num_computed
        sequence.block_ids = progress.block_ids
        sequence.steps.append((progress.num_computed, self._step_started_ns))
        self._save_computed(sequence)

    def _save_computed(self, sequence: _Sequence) -> None:
        """Ask for copies of the sinks whose chunks are computed."""
        for index in sorted(sequence.sinks):
            sink = sequence.sinks[index]
            if index * self._chunk_tokens + sink.num_tokens > sequence.num_computed:
                break
            del sequence.sinks[index]
            self._save(sequence, sink)

    def _save(self, sequence: _Sequence, sink: SinkPlace) -> None:
        start = sink.index * self._chunk_tokens
        first = start // self._block_tokens
        num_blocks = -(-sink.num_tokens // self._block_tokens)
        block_ids = sequence.block_ids[first : first + num_blocks]
        started_ns = next((began_ns for reached, began_ns in sequence.steps if reached > start), self._step_started_ns)
        is_hot = sequence.binding is not None and start + sink.num_tokens <= sequence.binding.num_hot
        after = sequence.computed
        sequence.num_copies += 1

        def copy() -> None:
            error = ""
            if not sequence.is_dropped:
                try:
                    self._copier.save(sink.place, num_blocks, block_ids, after)
                except (OSError, RuntimeError) as failure:
                    error = f"{type(failure).__name__}: {failure}"
            with self._lock:
                sequence.num_copies -= 1
                self._news.notify()
            self._send(Written(sequence.seq, sink.index, started_ns, time.time_ns(), is_hot, error))

        self._copies.put(copy)

    def _record(self) -> "torch.cuda.Event | None":
        """On a GPU, the moment at which all that was launched so far is done."""
        if self._copier.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _drop(self, sequence: _Sequence) -> None:
        sequence.is_dropped = True
        self._news.notify()
        sequence.waiting.clear()
        sequence.sinks.clear()
        self._copies.put(lambda: self._send(Dropped(sequence.seq)))
        unbound = [each for each in self._sequences.values() if each.is_dropped and each.binding is None]
        for oldest in unbound[:-_MAX_UNBOUND]:
            del self._sequences[oldest.seq]

    def _end_load(self, sequence: _Sequence) -> None:
        binding = sequence.binding
        assert binding is not None
        sequence.is_load_reported = True
        valid = 0 if sequence.filled is None or sequence.is_dropped else sequence.filled
        if sequence.failed_at is not None:
            valid = min(valid, sequence.failed_at)
        valid = min(max(valid, binding.num_hot), binding.num_target)
        sequence.num_computed = valid
        if valid < binding.num_target:
            first, stop = valid // self._block_tokens, -(-binding.num_target // self._block_tokens)
            self._invalid_blocks.update(binding.block_ids[first:stop])

    def _forget(self, sequence: _Sequence) -> None:
        """When both sides are through with it."""
        is_over = sequence.is_finished and sequence.is_dropped and sequence.num_copies == 0
        if is_over and not sequence.is_kept and not sequence.is_loading and sequence.binding is not None:
            del self._by_request[sequence.binding.request_id]
            self._sequences.pop(sequence.seq, None)

    # The copying thread.

    def _copy(self) -> None:
        while (copy := self._copies.get()) is not None:
            copy()
