"""The same requests, at the same times, to the live system and to the simulator.

Live: `halfmoon up` with the `sim` engine, real broker, pools and conductor. Simulated: the same requests, policy, pool
sizes and engine times on a virtual clock, and what services add to a lone request, measured before on the idle system.
Prompts and completions are an eighth as long as the trace's, and chunks with them (64 tokens for its blocks of 512),
so that two cores carry them.
"""

import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
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
from support.agreement import Placed
from support.system import System
from support.tiny_tokenizer import byte_level

TRACE = Path(__file__).parents[1] / "data" / "mooncake" / "conversation_trace.jsonl.xz"
SCALE = 8
CHUNK_TOKENS = 512 // SCALE
NUM_LONE = 12
ARENA_MIB = 16
KV_TOKENS = 1 << 18
MAX_BATCH = 64
VOCABULARY = 400
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
_PAGE_BYTES = 4096
_END_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    seconds: float = 300.0
    """Of the trace, from its begin."""
    stretch: float = 1.0
    """2: requests come half as fast, and the engine takes twice as long; what services add counts for half as much."""

    @property
    def prefill_tokens_per_s(self) -> float:
        return 4_000.0 / self.stretch

    @property
    def step_s(self) -> float:
        return 0.02 * self.stretch

    def requests(self) -> list[TracedRequest]:
        found = []
        for traced in open_trace(TRACE).requests:
            if traced.at_ms >= 1000 * self.seconds:
                break
            prompt, completion = traced.prompt_tokens // SCALE, max(1, (traced.completion_tokens or 1) // SCALE)
            if prompt > 1:
                found.append(
                    replace(
                        traced,
                        at_ms=traced.at_ms * self.stretch,
                        prompt_tokens=prompt,
                        completion_tokens=completion,
                    )
                )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    setup: Setup
    live: Sequence[Placed]
    simulated: Sequence[Placed]
    lone_s: float
    """What services add to a lone request's TTFT, one chunk long; median."""
    late_s: float
    """How late requests were sent, 99th percentile: more than a few ms, and the machine didn't keep up."""


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


def compare(setup: Setup) -> Figures:
    """Takes `seconds` times `stretch`, and a minute."""
    requests = setup.requests()
    with tempfile.TemporaryDirectory() as folder:
        model = byte_level(Path(folder) / "tiny")
        (model / "config.json").write_bytes(msgspec.json.encode(CONFIG))
        settings = {
            "HALFMOON_PREFILL_SIM_PREFILL_TOKENS_PER_S": str(setup.prefill_tokens_per_s),
            "HALFMOON_DECODE_SIM_PREFILL_TOKENS_PER_S": str(setup.prefill_tokens_per_s),
            "HALFMOON_DECODE_SIM_DECODE_STEP_S": str(setup.step_s),
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
            live, lone_s, late_s = asyncio.run(_live(system.nats_url, setup, requests))
        finally:
            system.stop()
    return Figures(setup=setup, live=live, simulated=_simulated(setup, requests, lone_s), lone_s=lone_s, late_s=late_s)


async def _live(url: str, setup: Setup, requests: Sequence[TracedRequest]) -> tuple[list[Placed], float, float]:
    connection = await nats.connect(url)
    client = _Client(connection, "tiny")
    await client.listen()
    lone = []
    for number in range(NUM_LONE):
        placed = Placed(-1 - number, (1_000_000 + number,), 0.0, CHUNK_TOKENS)
        await client.ask(placed, 1)
        await client.drained()
        if placed.ttft_s is not None:
            lone.append(placed.ttft_s - CHUNK_TOKENS / setup.prefill_tokens_per_s - setup.step_s)
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
    return live, statistics.median(lone), statistics.quantiles(late_s, n=100)[98]


def _simulated(setup: Setup, requests: Sequence[TracedRequest], lone_s: float) -> list[Placed]:
    machine = Machine(
        model="sim",
        hardware="the sim engine",
        timing=Timing.constant(prefill_tokens_per_s=setup.prefill_tokens_per_s, decode_step_s=setup.step_s),
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        kv_tokens=KV_TOKENS,
        cache_tokens=ARENA_MIB * (1 << 20) // _PAGE_BYTES * CHUNK_TOKENS,
        nic_bytes_per_s=1e10,
        request_s=lone_s,
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
