"""The torch engine against transformers' `generate`: same weights, threads and process, turn by turn in one run.

    python -m benchmarks.engine [MODEL] [--threads N] [--rounds N] [--json FILE]

Decode: tokens a second over all sequences, while all of them decode. Prefill: tokens a second up to the first token.
Each figure is the median over the rounds; whoever else uses the machine disturbs both sides alike.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from halfmoon.engine.contract import DecodeSpec, Engine, SequenceSpec
from halfmoon.engine.torch import TorchEngine, TorchEngineConfig
from halfmoon.models.smollm2 import fetch
from halfmoon.schemas.requests import Sampling

BATCHES = (1, 8, 16)
PREFILL_TOKENS = 512
PROMPT_TOKENS = 64
NEW_TOKENS = 24


def run(model: Path | None = None, *, threads: int | None = None, rounds: int = 5) -> dict[str, Any]:
    """Measure; the figures in tokens a second, by name, as `{"halfmoon": …, "transformers": …}`."""
    threads = threads or worker_threads()
    torch.set_num_threads(threads)
    return asyncio.run(_measure(model or default_model(), threads, rounds))


def worker_threads() -> int:
    """What a worker gets where one prefill and one decode worker share this machine."""
    return max(1, (os.cpu_count() or 1) // 2)


def default_model() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return fetch(Path(os.environ.get("HALFMOON_MODELS_DIR", cache / "halfmoon" / "models")))


async def _measure(model: Path, threads: int, rounds: int) -> dict[str, Any]:
    plain = _Transformers(model)
    figures: dict[str, tuple[list[float], list[float]]] = {}
    async with _started(model, threads) as engine:
        for turn in range(rounds + 1):
            for batch in BATCHES:
                prompts = [random_prompt(PROMPT_TOKENS, seed=1000 * turn + row) for row in range(batch)]
                ours, theirs = figures.setdefault(f"decode, batch {batch}", ([], []))
                ours.append(decode_speed(await generate(engine, prompts, NEW_TOKENS)))
                theirs.append(decode_speed(await asyncio.to_thread(plain.generate, prompts, NEW_TOKENS)))
            prompt = random_prompt(PREFILL_TOKENS, seed=turn)
            ours, theirs = figures.setdefault(f"prefill, {PREFILL_TOKENS} tokens", ([], []))
            started = time.perf_counter()
            ours.append(PREFILL_TOKENS / ((await generate(engine, [prompt], 1))[0][0] - started))
            started = time.perf_counter()
            theirs.append(PREFILL_TOKENS / ((await asyncio.to_thread(plain.generate, [prompt], 1))[0][0] - started))
    return {
        "model": model.name,
        "threads": threads,
        "rounds": rounds,
        "unit": "tokens/s",
        # The first turn warms up: kernels are made for each new shape.
        "figures": {
            name: {"halfmoon": statistics.median(ours[1:]), "transformers": statistics.median(theirs[1:])}
            for name, (ours, theirs) in figures.items()
        },
    }


@asynccontextmanager
async def _started(model: Path, threads: int) -> AsyncIterator[TorchEngine]:
    engine = TorchEngine(TorchEngineConfig(model=model, name="measured", device="cpu", threads=threads))
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


async def generate(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[float]]:
    """For each prompt, the times at which its tokens came."""

    async def one(number: int, prompt: Sequence[int]) -> list[float]:
        seq_id = f"sequence {number}"
        spec = DecodeSpec(Sampling(temperature=0.0, max_tokens=num_tokens), seed=0)
        engine.open(SequenceSpec(seq_id, prompt, len(prompt) + num_tokens, decode=spec))
        try:
            return [time.perf_counter() async for _ in engine.decode(seq_id, 0)]
        finally:
            await engine.close(seq_id)

    return list(await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts))))


class _Clock(StoppingCriteria):  # type: ignore[misc]
    """Called by `generate` after each token; remembers when, and never stops it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class _Transformers:
    def __init__(self, model: Path) -> None:
        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        # No end of sequence: each prompt gets all its tokens, as on the other side.
        self._model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[float]]:
        """For each prompt (all of one length), the times at which its tokens came."""
        clock = _Clock()
        tokens = torch.tensor(prompts)
        self._model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=num_tokens,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        return [clock.times] * len(prompts)


def random_prompt(num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(1000, 40_000, (num_tokens,), generator=generator).tolist()
    return tokens


def decode_speed(times: Sequence[Sequence[float]]) -> float:
    """Tokens a second from when the last sequence has begun until the first has ended."""
    start, stop = max(each[0] for each in times), min(each[-1] for each in times)
    return sum(start < time <= stop for each in times for time in each) / (stop - start)


def render(result: dict[str, Any]) -> Table:
    """The figures side by side, and how much each batch gains over one sequence."""
    table = Table(title=f"{result['model']}, fp32, {result['threads']} threads, {result['unit']}")
    for heading in ("", "halfmoon", "transformers", "ratio", "halfmoon, of batch 1"):
        table.add_column(heading, justify="left" if not heading else "right")
    figures: dict[str, dict[str, float]] = result["figures"]
    alone = figures["decode, batch 1"]["halfmoon"]
    for name, figure in figures.items():
        ours, theirs = figure["halfmoon"], figure["transformers"]
        gain = f"{ours / alone:.1f}×" if name.startswith("decode") else ""
        table.add_row(name, f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}×", gain)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="The torch engine against transformers' generate.")
    parser.add_argument("model", nargs="?", type=Path, help="a Hugging Face folder; the default model if left out")
    parser.add_argument("--threads", type=int, help="CPU threads for either side; half of the cores if left out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    arguments = parser.parse_args()
    result = run(arguments.model, threads=arguments.threads, rounds=arguments.rounds)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    Console().print(render(result))


if __name__ == "__main__":
    main()
