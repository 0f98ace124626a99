"""What the system adds to the bare engine, and what its cache saves. `python -m benchmarks.system`

Bare: the same engine alone in a process, doing what the two workers do: prefill, copy out, copy in, decode. System:
`halfmoon up`, one prefill worker per node and one decode worker, asked over HTTP, or with halves sent straight to the
workers.
"""

import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx

from halfmoon.engine.contract import ChunkSink, DecodeSpec, Engine, SequenceSpec
from halfmoon.engine.factory import EngineSettings, build_engine
from halfmoon.schemas.requests import Sampling
from support.halves import Outcome, halves
from support.model import small_model
from support.system import System

CHUNK_TOKENS = 256
LONG_PROMPT_TOKENS = 1500
SHORT_PROMPT_TOKENS = 64
NUM_TOKENS = 16
ROUNDS = 40
LONG_ROUNDS = 5
THREADS = 1


@dataclass(frozen=True, slots=True)
class Latency:
    """Of many requests: time to the first token, and between tokens. Milliseconds."""

    first_p50_ms: float
    first_p99_ms: float
    token_p50_ms: float


@dataclass(frozen=True, slots=True)
class SystemFigures:
    bare: Latency
    system: Latency
    sim: Latency
    """The system with an engine that takes no time: all of it is ours."""
    cold_ms: float
    local_ms: float
    remote_ms: float
    """TTFT of a 1,500-token prompt; medians."""


def tokens(count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(1000, 40_000) for _ in range(count)]


def latency(firsts_s: Sequence[float], gaps_s: Sequence[float]) -> Latency:
    return Latency(
        first_p50_ms=1000 * statistics.median(firsts_s),
        first_p99_ms=1000 * statistics.quantiles(firsts_s, n=100, method="inclusive")[98],
        token_p50_ms=1000 * statistics.median(gaps_s),
    )


async def measure_bare(model: Path) -> Latency:
    engine = build_engine("torch", EngineSettings(model=model, name="bare", chunk_tokens=CHUNK_TOKENS, threads=THREADS))
    card = await engine.start()
    firsts, gaps = [], []
    for round_number in range(ROUNDS + 1):
        prompt = tokens(SHORT_PROMPT_TOKENS, round_number)
        times = [time.monotonic(), *await _generate(engine, prompt, card.kv_bytes_per_token)]
        if round_number:  # the first warms up
            firsts.append(times[1] - times[0])
            gaps += [after - before for before, after in pairwise(times[1:])]
    await engine.stop()
    return latency(firsts, gaps)


async def _generate(engine: Engine, prompt: list[int], kv_bytes_per_token: int) -> list[float]:
    """Times at which the tokens came."""
    payload = memoryview(bytearray((len(prompt) - 1) * kv_bytes_per_token))
    engine.open(SequenceSpec("prefill", prompt, len(prompt)))
    async for _ in engine.prefill("prefill", 0, len(prompt) - 1, [ChunkSink(0, len(prompt) - 1, payload)]):
        pass
    await engine.close("prefill")
    spec = DecodeSpec(Sampling(temperature=0.0, max_tokens=NUM_TOKENS), seed=0)
    engine.open(SequenceSpec("decode", prompt, len(prompt) + NUM_TOKENS, decode=spec))
    await engine.load("decode", 0, len(prompt) - 1, payload)
    times = [time.monotonic() async for _ in engine.decode("decode", len(prompt) - 1)]
    await engine.close("decode")
    return times


async def measure_http(system: System, rounds: int) -> Latency:
    """The same prompts through the gateway, one after the other."""
    firsts, gaps = [], []
    async with httpx.AsyncClient(base_url=system.url, timeout=60) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        for round_number in range(rounds + 1):
            body = {
                "model": model,
                "prompt": tokens(SHORT_PROMPT_TOKENS, round_number),
                "max_tokens": NUM_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            times = [time.monotonic()]
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                times += [time.monotonic() async for line in answer.aiter_lines() if _is_token(line)]
            if round_number:
                firsts.append(times[1] - times[0])
                gaps += [after - before for before, after in pairwise(times[1:])]
    return latency(firsts, gaps)


def _is_token(line: str) -> bool:
    return line.startswith("data: {") and json.loads(line[6:])["choices"][0]["finish_reason"] is None


async def measure_long(system: System) -> tuple[float, float, float]:
    """TTFT in ms, medians: cold; all whole chunks on the prefill worker's node; all of them on the other node."""
    times: dict[str, list[float]] = {"cold": [], "local": [], "remote": []}
    num_whole = LONG_PROMPT_TOKENS // CHUNK_TOKENS
    async with halves(system.nats_url) as driver:
        for round_number in range(LONG_ROUNDS):
            prompt = tokens(LONG_PROMPT_TOKENS, 10_000 + round_number)
            for case, prefill, reuse in (
                ("cold", "prefill-1", []),
                ("local", "prefill-1", ["node-a"] * num_whole),
                ("remote", "prefill-2", ["node-a"] * num_whole),
            ):
                outcome = await driver.send(prompt, prefill=prefill, decode="decode-1", reuse=reuse, max_tokens=2)
                times[case].append(_ttft_ms(outcome))
    return statistics.median(times["cold"]), statistics.median(times["local"]), statistics.median(times["remote"])


def _ttft_ms(outcome: Outcome) -> float:
    if not outcome.token_times_s:
        raise RuntimeError(f"a request came to nothing: {outcome.terminal}")
    return 1000 * (outcome.token_times_s[0] - outcome.sent_s)


def measure() -> SystemFigures:
    """Takes about three minutes."""
    model = small_model()
    # In a process of its own: torch's threads and memory shouldn't be there when the system is measured.
    script = "import asyncio, benchmarks.system as b, msgspec, support.model as m; " + (
        "print(msgspec.json.encode(asyncio.run(b.measure_bare(m.small_model()))).decode())"
    )
    bare = json.loads(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)
    with tempfile.TemporaryDirectory() as folder:
        common = (f"--chunk-tokens={CHUNK_TOKENS}", f"--threads={THREADS}", "--arena-mib=1024", "--prefill=2")
        system = System.start(Path(folder) / "torch", model, *common)
        try:
            through = asyncio.run(measure_http(system, ROUNDS))
            cold_ms, local_ms, remote_ms = asyncio.run(measure_long(system))
        finally:
            system.stop()
        no_time = {"HALFMOON_PREFILL_SIM_PREFILL_TOKENS_PER_S": "1e9", "HALFMOON_DECODE_SIM_DECODE_STEP_S": "0"}
        system = System.start(Path(folder) / "sim", model, "--engine=sim", "--arena-mib=64", environ=no_time)
        try:
            sim = asyncio.run(measure_http(system, 5 * ROUNDS))
        finally:
            system.stop()
    return SystemFigures(Latency(**bare), through, sim, cold_ms, local_ms, remote_ms)


if __name__ == "__main__":
    print(measure())
