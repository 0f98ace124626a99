"""From a trace to the requests of a simulation: faster, slower, a slice, or many times over. One at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from halfmoon.schemas.ids import ChunkKey, RequestId
from halfmoon.sim.errors import SimError
from halfmoon.sim.request import SimRequest
from halfmoon.traces import TraceError, num_lines_of, open_trace

_UNKNOWN_COMPLETION = 128
"""Tokens of a completion whose length the trace doesn't have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    path: Path
    speed: float = 1.0
    """2: everything comes in half the time."""
    repeat: int = 1
    """So many times over, each time with other prompts."""
    limit: int | None = None
    begin_s: float = 0.0
    seconds: float | None = None
    """Only what came within this stretch of the trace, in the trace's own time."""
    chunk_tokens: int | None = None
    """None: the trace's blocks."""
    max_tokens: int = 2048
    """What each client asks for, or its completion's length where that is more."""
    only: str | None = None

    def check(self) -> int:
        """Tokens of a chunk. Raises `SimError` where the trace can't be cut into such."""
        try:
            block = open_trace(self.path, model=self.only).block_tokens
        except TraceError as error:
            raise SimError(str(error)) from None
        if self.chunk_tokens is None:
            return block or 256
        if block is not None and self.chunk_tokens % block:
            raise SimError(f"{self.path} has blocks of {block} tokens: chunks must be a multiple of it")
        return self.chunk_tokens

    def count(self) -> int:
        """Requests at most: lines of the trace, so often as it is repeated. For a progress bar."""
        num_lines = self.repeat * num_lines_of(self.path)
        return num_lines if self.limit is None else min(self.limit, num_lines)

    def __iter__(self) -> Iterator[SimRequest]:
        """Raises `SimError` where the trace can't be read on."""
        chunk_tokens = self.check()
        number = 0
        offset_s = 0.0
        for turn in range(self.repeat):
            last_s = 0.0
            try:
                trace = open_trace(self.path, model=self.only)
                group_of = _chunks(trace.block_tokens, chunk_tokens)
                for traced in trace.requests:
                    at_s = traced.at_ms / 1000 - self.begin_s
                    if at_s < 0 or traced.prompt_tokens < 1:
                        continue
                    if self.seconds is not None and at_s >= self.seconds:
                        break
                    if self.limit is not None and number >= self.limit:
                        return
                    completion = traced.completion_tokens
                    completion = _UNKNOWN_COMPLETION if completion is None else max(1, completion)
                    last_s = at_s
                    yield SimRequest(
                        request_id=RequestId(f"r{number}"),
                        number=number,
                        at_s=offset_s + at_s / self.speed,
                        num_tokens=traced.prompt_tokens,
                        num_completion=completion,
                        keys=group_of(traced.blocks or (), traced.prompt_tokens, turn, traced.group),
                        max_tokens=max(self.max_tokens, completion),
                        group=traced.group,
                    )
                    number += 1
            except TraceError as error:
                raise SimError(str(error)) from None
            offset_s += last_s / self.speed
        if not number:
            raise SimError(f"{self.path} has no requests in the stretch that was asked for")


def _chunks(
    block_tokens: int | None, chunk_tokens: int
) -> Callable[[tuple[int, ...], int, int, str], tuple[ChunkKey, ...]]:
    """Keys of a prompt's whole chunks. A block's hash stands for all before it, so a chunk's last block names it."""
    if block_tokens is None:
        return lambda blocks, num_tokens, turn, group: ()
    step = chunk_tokens // block_tokens

    def keys(blocks: tuple[int, ...], num_tokens: int, turn: int, group: str) -> tuple[ChunkKey, ...]:
        end = turn.to_bytes(4, "little") + group.encode()
        whole = blocks[step - 1 : num_tokens // chunk_tokens * step : step]
        return tuple(ChunkKey(block.to_bytes(8, "little") + end) for block in whole)

    return keys
