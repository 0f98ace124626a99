"""One open sequence: what vLLM has been told of it, and who waits for what."""

import asyncio
from dataclasses import dataclass, field

from halfmoon.engine.contract import ChunkSink, ChunkWritten, Sampled, SequenceSpec
from halfmoon.engine.vllm.messages import Written
from halfmoon.engine.vllm.staging import Staged


@dataclass(slots=True)
class PendingSink:
    sink: ChunkSink
    staged: Staged


@dataclass(slots=True)
class OpenSequence:
    """Owned by the event loop."""

    spec: SequenceSpec
    number: int
    """What it is called between the engine and its connector."""
    num_blocks: int
    """Claimed."""
    bound: "asyncio.Future[int]"
    """Hot tokens, once vLLM has given it blocks."""
    dropped: asyncio.Event = field(default_factory=asyncio.Event)
    """No rank touches anything of it any more."""
    outbox: "asyncio.Queue[Sampled | Exception | None]" = field(default_factory=asyncio.Queue)
    """Bounded by the sequence itself: one item per token. None ends it."""
    written: "asyncio.Queue[ChunkWritten | Exception]" = field(default_factory=asyncio.Queue)
    request: "asyncio.Task[None] | None" = None
    """Reads what vLLM generates; None until the sequence is submitted."""
    loads: "dict[int, asyncio.Future[str]]" = field(default_factory=dict)
    """By the order's number; the result is what went wrong, or empty."""
    sinks: dict[int, PendingSink] = field(default_factory=dict)
    staged: list[Staged] = field(default_factory=list)
    is_running: bool = False
    closing: "asyncio.Task[None] | None" = None

    @property
    def is_closed(self) -> bool:
        return self.closing is not None

    def take_written(self, report: Written) -> None:
        pending = self.sinks.pop(report.index, None)
        if pending is None or self.is_closed:
            return
        pending.staged.copy_out(pending.sink.payload)
        pending.staged.release()
        self.written.put_nowait(ChunkWritten(report.index, report.started_ns, report.finished_ns, is_hot=report.is_hot))

    def end(self, error: Exception) -> None:
        """Tell all who wait."""
        self.outbox.put_nowait(error)
        self.written.put_nowait(error)
        if not self.bound.done():
            self.bound.set_exception(error)
            self.bound.exception()  # Nobody may be waiting.
        for load in self.loads.values():
            if not load.done():
                load.set_exception(error)
                load.exception()
        self.loads.clear()

    def release(self) -> None:
        for staged in self.staged:
            staged.release()
        self.sinks.clear()
