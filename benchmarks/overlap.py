"""What streaming the hand-over saves: from prefill's end to decode's first token. `python -m benchmarks.overlap`

A prompt of 1,500 tokens, computed in steps. `each`: decode is told of every chunk as it is finished, and reads it while
the next is computed. `end`: it is told of all of them when the prompt is done. Two whole systems, asked by turns, for
each way that KV moves. Prefill's end is that of its span `prefill.compute`; the first token's time is its reader's.
"""

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path

from support.halves import Halves, halves
from support.handover import handover_of
from support.model import small_model
from support.system import System

CHUNK_TOKENS = 256
PROMPT_TOKENS = 1500
ROUNDS = 5
HEADING = "## Chunks handed over while the prompt is computed"
ANNOUNCE = ("each", "end")
WAYS = {
    "shm, in place": ("auto", "true"),
    "shm, copied": ("auto", "false"),
    "tcp": ("tcp", "true"),
}
"""How KV moves: `--transport` of `halfmoon up`, and `HALFMOON_KV_TIER_READ_IN_PLACE`."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """One way of telling, and one of moving; medians."""

    way: str
    announce: str
    kv_ms: float
    """From the end of prefill's computation until decode has all KV."""
    first_token_ms: float
    """From the end of prefill's computation until the first token is at its reader."""
    num_late_chunks: float
    """Chunks that decode got only after prefill had ended."""


@dataclass(frozen=True, slots=True)
class _Round:
    kv_ms: float
    first_token_ms: float
    num_late_chunks: int


async def _ask(system: System, driver: Halves, prompt: Sequence[int]) -> _Round:
    unix_s = time.time() - time.monotonic()
    outcome = await driver.send(prompt, prefill="prefill-1", decode="decode-1", max_tokens=2)
    if outcome.terminal is None or not outcome.token_times_s:
        raise RuntimeError(f"a request came to nothing: {outcome.terminal}")
    found = await asyncio.to_thread(handover_of, system, outcome.terminal.request_id)
    return _Round(
        kv_ms=(found.waited_ns - found.computed_ns) / 1e6,
        first_token_ms=1000 * (outcome.token_times_s[0] + unix_s) - found.computed_ns / 1e6,
        num_late_chunks=len(found.late_chunks),
    )


async def _by_turns(systems: dict[str, System], way: str) -> list[Overlap]:
    generator = random.Random(way)
    rounds: dict[str, list[_Round]] = {announce: [] for announce in systems}
    async with AsyncExitStack() as stack:
        drivers = {name: await stack.enter_async_context(halves(system.nats_url)) for name, system in systems.items()}
        for round_number in range(ROUNDS + 1):
            prompt = [generator.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)]
            for name, system in systems.items():
                found = await _ask(system, drivers[name], prompt)
                if round_number:  # the first warms up
                    rounds[name].append(found)
    return [
        Overlap(
            way=way,
            announce=name,
            kv_ms=statistics.median(each.kv_ms for each in found),
            first_token_ms=statistics.median(each.first_token_ms for each in found),
            num_late_chunks=statistics.median(each.num_late_chunks for each in found),
        )
        for name, found in rounds.items()
    ]


def measure() -> list[Overlap]:
    """Takes about six minutes, and 5 GB of memory."""
    model = small_model()
    figures: list[Overlap] = []
    for way, (transport, in_place) in WAYS.items():
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            systems: dict[str, System] = {}
            for announce in ANNOUNCE:
                system = System.start(
                    Path(folder) / announce,
                    model,
                    f"--chunk-tokens={CHUNK_TOKENS}",
                    "--threads=1",
                    "--arena-mib=768",
                    f"--transport={transport}",
                    environ={"HALFMOON_PREFILL_ANNOUNCE": announce, "HALFMOON_KV_TIER_READ_IN_PLACE": in_place},
                )
                stack.callback(system.stop)
                systems[announce] = system
            figures += asyncio.run(_by_turns(systems, way))
    return figures


def section(figures: Sequence[Overlap]) -> list[str]:
    """Its part of docs/benchmarks.md."""
    num_chunks = -(-PROMPT_TOKENS // CHUNK_TOKENS)
    lines = [
        HEADING,
        "",
        f"A prompt of {PROMPT_TOKENS:,} tokens, {num_chunks} chunks; times from the end of prefill's computation, "
        f"medians of {ROUNDS}, the two by turns. Each: decode is told of a chunk when it is finished. End: of all of "
        "them when the prompt is done (`HALFMOON_PREFILL_ANNOUNCE=end`). The first token includes one decode step. "
        "Copied: `HALFMOON_KV_TIER_READ_IN_PLACE=false`.",
        "",
        "| | told | chunks that came after prefill's end | decode has all KV, ms | first token, ms |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {each.way} | {each.announce} | {each.num_late_chunks:g} | {each.kv_ms:.1f} | {each.first_token_ms:.1f} |"
        for each in figures
    ]
    return lines


if __name__ == "__main__":
    print("\n".join(section(measure())))
