"""One step of the model: packed tokens in, sampled tokens and exported chunks out. Runs in the engine's step thread."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from halfmoon.engine.torch.attention import PagedStep, Segment, causal_mask
from halfmoon.engine.torch.kv import Extent, LayerReader, PagedKV
from halfmoon.engine.torch.sampling import Draw, Drawn, sample

_TILE_TOKENS = 64
"""Queries that attend together: fewer waste less on hidden positions, more are computed faster."""


@dataclass(frozen=True, slots=True)
class Export:
    """A chunk to copy out once its positions are computed."""

    index: int
    start: int
    num_tokens: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step: compute positions `[start, start + len(tokens))`."""

    tokens: Sequence[int]
    start: int
    extent: Extent
    draw: Draw | None
    """How to sample after the last position; None where no token is wanted."""
    exports: Sequence[Export]


@dataclass(frozen=True, slots=True)
class StepResult:
    drawn: list[Drawn | None]
    """One per row."""
    started_ns: int
    finished_ns: int
    """Unix time; exports included."""
    compute_s: float
    """Without exports."""


class Runner:
    """The model and its KV. Not thread-safe: one step at a time."""

    def __init__(self, model: PreTrainedModel, kv: PagedKV, device: torch.device) -> None:
        self._model = model
        self._kv = kv
        self._device = device
        config = model.config
        self._groups: int = config.num_attention_heads // (config.num_key_value_heads or config.num_attention_heads)

    @torch.inference_mode()
    def run(self, rows: Sequence[Row]) -> StepResult:
        started_ns = time.time_ns()
        begun = time.perf_counter()
        drawn = self._forward(rows)
        compute_s = time.perf_counter() - begun
        for row in rows:
            for export in row.exports:
                self._kv.export(row.extent, export.start, export.num_tokens, export.payload)
        return StepResult(drawn, started_ns, time.time_ns(), compute_s)

    def _forward(self, rows: Sequence[Row]) -> list[Drawn | None]:
        tokens: list[int] = []
        positions: list[int] = []
        singles: list[LayerReader] = []
        segments: list[Segment] = []
        last_rows: list[int] = []
        for row in rows:
            begin, count, stop = len(tokens), len(row.tokens), row.start + len(row.tokens)
            tokens += row.tokens
            positions += range(row.start, stop)
            if count == 1 and not segments:
                singles.append(self._kv.reader(row.extent, stop))
            else:
                segments += self._tiles(row, begin)
            if row.draw is not None:
                last_rows.append(len(tokens) - 1)
        slots = torch.cat([row.extent.slots[row.start : row.start + len(row.tokens)] for row in rows])
        logits = self._model(
            input_ids=torch.tensor([tokens], device=self._device),
            position_ids=torch.tensor([positions], device=self._device),
            use_cache=False,
            logits_to_keep=torch.tensor(last_rows, dtype=torch.long, device=self._device),
            paged_step=PagedStep(self._kv, slots, singles, segments),
        ).logits[0]
        draws = [row.draw for row in rows if row.draw is not None]
        sampled = iter(sample(logits, draws) if draws else [])
        return [next(sampled) if row.draw is not None else None for row in rows]

    def _tiles(self, row: Row, begin: int) -> Iterator[Segment]:
        """The row's queries in groups, each of which attends up to its own last position."""
        for first in range(0, len(row.tokens), _TILE_TOKENS):
            count = min(_TILE_TOKENS, len(row.tokens) - first)
            stop = row.start + first + count
            mask = causal_mask(count, stop, self._groups, self._kv.dtype, self._device)
            yield Segment(begin + first, count, self._kv.reader(row.extent, stop), mask)
