"""The live system beside the simulator, on the same five minutes: `python -m benchmarks live`; about six minutes.

Live: `halfmoon up` with the `sim` engine, real broker, pools and conductor, asked at the trace's own times. Simulated:
the same requests, policy, pool sizes and engine times on a virtual clock. Prompts and completions are an eighth as long
as the trace's, and chunks with them (64 tokens for its blocks of 512), so that two cores carry them.

What the simulator leaves out is what services add to each request. It is measured in the same run, by lone requests on
the idle system, and shown beside the figures that it has to be added to.
"""

import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgpack
import msgspec
import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from halfmoon.engine.sim.timing import Timing
from halfmoon.engine.sim.tokens import KV_BYTES_PER_TOKEN
from halfmoon.schemas.ids import ChunkKey, RequestId
from halfmoon.sim.options import SimOptions
from halfmoon.sim.profiles.machine import Machine
from halfmoon.sim.request import SimRequest
from halfmoon.sim.simulation import Simulation
from halfmoon.traces import TracedRequest, open_trace
from support.system import System
from support.tiny_tokenizer import byte_level

HEADING = "## The live system beside the simulator"
TRACE = Path(__file__).parents[1] / "tests" / "data" / "mooncake" / "conversation_trace.jsonl.xz"
SCALE = 8
CHUNK_TOKENS = 512 // SCALE
SECONDS = 300.0
NUM_LONE = 30
PREFILL_TOKENS_PER_S = 4_000.0
STEP_S = 0.02
ARENA_MIB = 16
KV_TOKENS = 1 << 18
MAX_BATCH = 64
VOCABULARY = 400
_PAGE_BYTES = 4096
_END_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Placed:
    """One request, live or simulated: where it went, and how it fared. Seconds."""

    number: int
    blocks: tuple[int, ...]
    at_s: float
    prompt_tokens: int
    prefill: str = ""
    reused_tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None
    num_tokens: int = 0


@dataclass(slots=True)
class Figures:
    live: list[Placed]
    simulated: list[Placed]
    lone_s: float = 0.0
    """What services add to a lone request's TTFT; median."""
    late_s: float = 0.0
    """How late requests were sent, 99th percentile: more than a few ms, and the machine didn't keep up."""
    num_lost: int = 0
    seconds: float = SECONDS


class _Client:
    """Asks over NATS, and hears where halves go."""

    def __init__(self, connection: Client, model: str) -> None:
        self._model = model
        self._nats = connection
        self._stream = connection.jetstream()
        self._inbox = connection.new_inbox()
        self._placed: dict[str, Placed] = {}
        self._num_open = 0
        self._ended = asyncio.Event()

    async def listen(self) -> None:
        await self._nats.subscribe(f"{self._inbox}.*", cb=self._hear)
        await self._nats.subscribe("halfmoon.request.split.prefill.*", cb=self._hear_half)

    async def ask(self, placed: Placed, max_tokens: int) -> None:
        name = f"live-{placed.number}"
        self._placed[name] = placed
        self._num_open += 1
        body = {
            "type": "request.submitted.v1",
            "request_id": name,
            "tokens": tokens_of(placed.blocks, placed.prompt_tokens),
            "sampling": {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True},
        }
        placed.at_s = time.monotonic()
        headers = {"halfmoon-reply": f"{self._inbox}.{name}"}
        await self._stream.publish(f"halfmoon.request.{self._model}", msgpack.packb(body), timeout=10, headers=headers)

    async def _hear(self, message: Msg) -> None:
        placed = self._placed[message.subject.rsplit(".", 1)[1]]
        event = msgpack.unpackb(message.data)
        now_s = time.monotonic()
        if event["type"] == "tokens.v1":
            placed.first_s = placed.first_s or now_s
            placed.last_s = now_s
            placed.num_tokens += len(event["tokens"])
            return
        self._num_open -= 1
        if event["type"] == "finished.v1":
            placed.reused_tokens = event["usage"].get("cached_tokens", 0)
        else:
            placed.first_s = None
        self._ended.set()

    async def drained(self) -> None:
        """Return once everything has ended, or after two minutes in which something hasn't."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_TIMEOUT_S):
                while self._num_open:
                    self._ended.clear()
                    await self._ended.wait()

    async def _hear_half(self, message: Msg) -> None:
        half = msgpack.unpackb(message.data)
        if half["type"] == "split.prefill.v1" and half["request_id"] in self._placed:
            self._placed[half["request_id"]].prefill = message.subject.rsplit(".", 1)[1]


def tokens_of(blocks: Sequence[int], num_tokens: int) -> list[int]:
    """The same blocks, the same tokens."""
    drawn: list[int] = []
    for block in blocks:
        drawn += random.Random(block).choices(range(2, VOCABULARY), k=CHUNK_TOKENS)
    return drawn[:num_tokens]


def slice_of_trace(seconds: float) -> list[TracedRequest]:
    """An eighth as long; those that still fit the model."""
    found = []
    for traced in open_trace(TRACE).requests:
        if traced.at_ms >= 1000 * seconds:
            break
        prompt, completion = traced.prompt_tokens // SCALE, max(1, (traced.completion_tokens or 1) // SCALE)
        if prompt > 1:
            found.append(replace(traced, prompt_tokens=prompt, completion_tokens=completion))
    return found


def simulate(requests: Sequence[TracedRequest]) -> list[Placed]:
    machine = Machine(
        model="sim",
        hardware="the sim engine",
        timing=Timing.constant(prefill_tokens_per_s=PREFILL_TOKENS_PER_S, decode_step_s=STEP_S),
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        kv_tokens=KV_TOKENS,
        cache_tokens=ARENA_MIB * (1 << 20) // _PAGE_BYTES * CHUNK_TOKENS,
        nic_bytes_per_s=1e10,
    )
    ended: list[SimRequest] = []
    options = SimOptions(prefill=2, decode=2, max_batch=MAX_BATCH)
    simulation = Simulation(options, machine, CHUNK_TOKENS, ended.append)
    simulation.run(
        SimRequest(
            request_id=RequestId(f"r{number}"),
            number=number,
            at_s=traced.at_ms / 1000,
            num_tokens=traced.prompt_tokens,
            num_completion=traced.completion_tokens or 1,
            keys=tuple(
                ChunkKey(block.to_bytes(32, "little"))
                for block in (traced.blocks or ())[: traced.prompt_tokens // CHUNK_TOKENS]
            ),
            max_tokens=traced.completion_tokens or 1,
        )
        for number, traced in enumerate(requests)
    )
    return [
        Placed(
            number=each.number,
            blocks=requests[each.number].blocks or (),
            at_s=each.at_s,
            prompt_tokens=each.num_tokens,
            prefill=each.prefill or "",
            reused_tokens=min(each.num_reused * CHUNK_TOKENS, each.num_tokens),
            first_s=each.first_token_s,
            last_s=each.last_token_s,
            num_tokens=each.num_completion,
        )
        for each in sorted(ended, key=lambda each: each.number)
    ]


async def run_live(url: str, requests: Sequence[TracedRequest]) -> Figures:
    connection = await nats.connect(url)
    client = _Client(connection, "tiny")
    await client.listen()
    lone = []
    for number in range(NUM_LONE):
        placed = Placed(-1 - number, (1_000_000 + number,), 0.0, CHUNK_TOKENS)
        await client.ask(placed, 1)
        await client.drained()
        if placed.first_s is not None:
            lone.append(placed.first_s - placed.at_s - CHUNK_TOKENS / PREFILL_TOKENS_PER_S - STEP_S)
    begin_s, late_s, live = time.monotonic(), [0.0], []
    for number, traced in enumerate(requests):
        due_s = begin_s + traced.at_ms / 1000
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        placed = Placed(number, traced.blocks or (), 0.0, traced.prompt_tokens)
        live.append(placed)
        await client.ask(placed, traced.completion_tokens or 1)
        late_s.append(placed.at_s - due_s)
    await client.drained()
    await connection.close()
    lost = sum(each.first_s is None for each in live)
    return Figures(live, [], statistics.median(lone), statistics.quantiles(late_s, n=100)[98], lost)


def run(seconds: float = SECONDS) -> Figures:
    requests = slice_of_trace(seconds)
    with tempfile.TemporaryDirectory() as folder:
        model = byte_level(Path(folder) / "tiny")
        (model / "config.json").write_bytes(msgspec.json.encode(CONFIG))
        settings = {
            "HALFMOON_PREFILL_SIM_PREFILL_TOKENS_PER_S": str(PREFILL_TOKENS_PER_S),
            "HALFMOON_DECODE_SIM_PREFILL_TOKENS_PER_S": str(PREFILL_TOKENS_PER_S),
            "HALFMOON_DECODE_SIM_DECODE_STEP_S": str(STEP_S),
            "HALFMOON_PREFILL_KV_TOKENS": str(KV_TOKENS),
            "HALFMOON_DECODE_KV_TOKENS": str(KV_TOKENS),
            "HALFMOON_DECODE_MAX_REQUESTS": str(MAX_BATCH),
            "HALFMOON_CONDUCTOR_MAX_WAITING_PER_WORKER": "64",
        }
        sizes = (f"--arena-mib={ARENA_MIB}", f"--chunk-tokens={CHUNK_TOKENS}")
        system = System.start(
            Path(folder) / "data", model, "--engine=sim", "--prefill=2", "--decode=2", *sizes, environ=settings
        )
        try:
            figures = asyncio.run(run_live(system.nats_url, requests))
        finally:
            system.stop()
    figures.simulated, figures.seconds = simulate(requests), seconds
    return figures


CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1 << 15,
}


def with_the_previous(placed: Sequence[Placed]) -> float:
    """Share of the requests that went where the last one went that has half of their chunks or more."""
    last: dict[int, str] = {}
    num_same = num_known = 0
    for each in placed:
        whole = each.blocks[: each.prompt_tokens // CHUNK_TOKENS]
        known = [last[block] for block in whole if block in last]
        if whole and 2 * len(known) >= len(whole):
            num_known += 1
            num_same += known[-1] == each.prefill
        last |= dict.fromkeys(whole, each.prefill)
    return num_same / max(1, num_known)


def section(figures: Figures) -> list[str]:
    live, simulated = figures.live, figures.simulated
    lines = [
        HEADING,
        "",
        f"{len(live):,} requests of {figures.seconds / 60:g} min of Mooncake's conversation trace, an eighth as long "
        f"({sum(each.prompt_tokens for each in live):,} prompt tokens), 2 prefill and 2 decode workers with the `sim` "
        f"engine ({PREFILL_TOKENS_PER_S:,.0f} prompt tokens/s, steps of {STEP_S * 1000:g} ms), pools of "
        f"{ARENA_MIB} MiB, `kv_centric`. Nothing but time is simulated in the live system; in the simulator everything "
        f"is. Services add {figures.lone_s * 1000:.0f} ms to a lone request's first token, which the simulator leaves "
        f"out. Requests were sent {figures.late_s * 1000:.1f} ms late at p99; {figures.num_lost} failed.",
        "",
        "| | live | simulated | simulated + services | live, of that |",
        "|---|---|---|---|---|",
    ]
    values: dict[str, Callable[[Sequence[float]], float]]
    values = {"mean": statistics.fmean, "p50": _p(50), "p90": _p(90), "p99": _p(99)}
    for name, value in values.items():
        ours, theirs = value(_ttfts(live)), value(_ttfts(simulated))
        both = theirs + figures.lone_s
        cells = " | ".join(f"{1000 * each:,.0f}" for each in (ours, theirs, both))
        lines.append(f"| TTFT {name}, ms | {cells} | {ours / both:.2f}× |")
    measures = {
        "between tokens, mean, ms": _gap_ms,
        "share of prompt tokens reused": _reuse,
        "share of prompts at the busier prefill worker": _busier,
        "share that went where the last one went that has half their chunks": with_the_previous,
    }
    for name, of in measures.items():
        ours, theirs = of(live), of(simulated)
        lines.append(f"| {name} | {ours:.3g} | {theirs:.3g} | | {ours / theirs:.2f}× |")
    return lines


def _p(percent: int) -> Callable[[Sequence[float]], float]:
    return lambda values: statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _ttfts(placed: Sequence[Placed]) -> list[float]:
    return [each.first_s - each.at_s for each in placed if each.first_s is not None]


def _gap_ms(placed: Sequence[Placed]) -> float:
    gaps = [
        (each.last_s - each.first_s) / (each.num_tokens - 1)
        for each in placed
        if each.first_s is not None and each.last_s is not None and each.num_tokens > 1
    ]
    return 1000 * statistics.fmean(gaps)


def _reuse(placed: Sequence[Placed]) -> float:
    return sum(each.reused_tokens for each in placed) / sum(each.prompt_tokens for each in placed)


def _busier(placed: Sequence[Placed]) -> float:
    counts = Counter(each.prefill for each in placed)
    return max(counts.values()) / sum(counts.values())


if __name__ == "__main__":
    print("\n".join(section(run(float(sys.argv[1]) if sys.argv[1:] else SECONDS))))
