"""One open sequence: what of it is computed, what is wanted next, and who waits for it."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from halfmoon.engine.contract import ChunkSink, ChunkWritten, DecodeSpec, Sampled, SequenceSpec
from halfmoon.engine.torch.kv import Extent
from halfmoon.engine.torch.runner import Export, Row, StepResult
from halfmoon.engine.torch.sampling import Draw, Drawn
from halfmoon.engine.torch.schedule import Part, Want


@dataclass(slots=True)
class OpenSequence:
    """Owned by the event loop; the step thread only sees the `Row`s made from it."""

    spec: SequenceSpec
    extent: Extent
    tokens: list[int]
    """Prompt, and what was sampled since."""
    outbox: "asyncio.Queue[ChunkWritten | Sampled | Exception | None]" = field(default_factory=asyncio.Queue)
    """Bounded by the sequence itself: one item per chunk or token. None ends the iterator."""
    computed: int = 0
    """Positions `[0, computed)` are in the KV."""
    goal: int | None = None
    """Compute up to here; None while nothing runs."""
    decoding: DecodeSpec | None = None
    num_sampled: int = 0
    sinks: deque[ChunkSink] = field(default_factory=deque)
    next_sink_at: int = 0
    """First position of the first of `sinks`."""
    sink_started_ns: int | None = None
    """When the step began that computed it; None before that step."""
    loads: set["asyncio.Future[None]"] = field(default_factory=set)
    closing: "asyncio.Task[None] | None" = None
    """Waits until no thread touches the sequence, then gives its blocks back."""

    @property
    def is_closed(self) -> bool:
        return self.closing is not None

    def begin_prefill(self, start: int, stop: int, sinks: list[ChunkSink]) -> None:
        self.computed, self.goal, self.decoding = start, stop, None
        self.sinks = deque(sinks)
        self.next_sink_at, self.sink_started_ns = start, None

    def begin_decode(self, num_computed: int, spec: DecodeSpec) -> None:
        self.computed, self.goal, self.decoding = num_computed, len(self.tokens), spec

    def want(self) -> Want | None:
        if self.goal is None or self.is_closed:
            return None
        is_decoding = self.decoding is not None and self.goal - self.computed == 1
        return Want(self.spec.seq_id, self.computed, self.goal, is_decoding)

    def row(self, part: Part, chunk_tokens: int) -> Row:
        draw = None
        if self.decoding is not None and part.stop == len(self.tokens):
            position = self.decoding.num_known + self.num_sampled
            draw = Draw(self.decoding.sampling, self.decoding.seed, position)
        exports = [
            Export(sink.index, sink.index * chunk_tokens, sink.num_tokens, sink.payload)
            for sink in self.sinks
            if sink.index * chunk_tokens + sink.num_tokens <= part.stop
        ]
        return Row(self.tokens[part.start : part.stop], part.start, self.extent, draw, exports)

    def advance(self, part: Part, row: Row, drawn: Drawn | None, result: StepResult) -> None:
        """Take in what a step has done, and tell who waits."""
        self.computed = part.stop
        for export in row.exports:
            self.sinks.popleft()
            started_ns = result.started_ns if self.sink_started_ns is None else self.sink_started_ns
            self.outbox.put_nowait(ChunkWritten(export.index, started_ns, result.finished_ns))
            self.next_sink_at, self.sink_started_ns = export.start + export.num_tokens, None
        if self.sinks and self.sink_started_ns is None and part.stop > self.next_sink_at:
            self.sink_started_ns = result.started_ns
        if drawn is not None:
            self._take_token(drawn)
        elif self.decoding is None and self.computed == self.goal:
            self.end(None)

    def end(self, how: Exception | None) -> None:
        """End the iterator that runs: normally, or with an error."""
        self.goal = None
        self.decoding = None
        self.outbox.put_nowait(how)

    def _take_token(self, drawn: Drawn) -> None:
        spec = self.decoding
        assert spec is not None
        position = spec.num_known + self.num_sampled
        self.num_sampled += 1
        self.tokens.append(drawn.token)
        self.goal = len(self.tokens)
        self.outbox.put_nowait(Sampled(position, drawn.token, drawn.logprob))
        is_last = spec.sampling.max_tokens is not None and position + 1 >= spec.sampling.max_tokens
        is_full = len(self.tokens) >= self.spec.max_tokens
        if drawn.token in spec.stop_tokens or is_last or is_full:
            self.end(None)
