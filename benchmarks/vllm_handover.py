"""A prompt's KV from one vLLM to another, through halfmoon's connector and through those that vLLM brings.

Every pair has the same settings, on one thread each, and hands over the same prompts: whole blocks, and two tokens that
decode computes (ExampleConnector finds what it has stored at some lengths only; this is one). The same prompt then
comes again, and is hot: the difference is what the hand-over costs.
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.engine import default_model, random_prompt
from halfmoon.engine.contract import ChunkSink, DecodeSpec, Engine, SequenceSpec
from halfmoon.engine.factory import EngineSettings, build_engine
from halfmoon.schemas.requests import Sampling
from support.engines import prefilled
from support.slots import Slots

KV_TOKENS = 2048
"""Two prompts: after two rounds every block has been used, and copies meet no page for the first time."""
WARM_UP_ROUNDS = 2
CHUNK_TOKENS = 256
NUM_CHUNKS = 4
NUM_MOVED = NUM_CHUNKS * CHUNK_TOKENS
PROMPT_TOKENS = NUM_MOVED + 2
NUM_TOKENS = 4
ROUNDS = 4
SHM = Path("/dev/shm")
NAMES = ("halfmoon", "example", "nixl")


@dataclass(frozen=True, slots=True)
class Answer:
    first_s: float
    """From the moment at which decode is asked to its first token."""
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Handover:
    """Medians over the rounds."""

    name: str
    num_bytes: int
    cold_ms: float
    """Prefill of the prompt, its KV stored or offered: who recomputes takes about as long."""
    first_ms: float
    """Decode's first token after a hand-over."""
    hot_ms: float
    """The same where decode holds the KV already: what computing one token takes."""
    load_ms: float | None
    """Until all bytes were in decode's KV, where that can be told."""
    is_right: bool
    """Whether decode said what prefill would have."""

    @property
    def cost_ms(self) -> float:
        return max(self.first_ms - self.hot_ms, 1e-3)

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.cost_ms / 1e6


class PairOfEngines(Protocol):
    async def prefill(self, prompt: list[int]) -> None: ...

    async def decode(self, prompt: list[int]) -> Answer:
        """What prefill has computed is loaded, where it isn't hot."""
        ...

    async def expected(self, prompt: list[int]) -> list[int]:
        """What prefill would generate."""
        ...

    load_s: list[float]


def _settings() -> EngineSettings:
    return EngineSettings(
        model=default_model(),
        name="measured",
        chunk_tokens=CHUNK_TOKENS,
        threads=1,
        kv_tokens=KV_TOKENS,
        block_tokens=128,
        step_tokens=2048,
    )


class Halfmoon:
    """The engine as a worker has it; the slots of an arena between the two."""

    def __init__(self, prefill: Engine, decode: Engine, slots: Slots) -> None:
        self._prefill = prefill
        self._decode = decode
        self._slots = slots
        self._chunks: list[ChunkSink] = []
        self.load_s: list[float] = []

    async def prefill(self, prompt: list[int]) -> None:
        self._slots.reset()
        self._chunks = await prefilled(self._prefill, prompt[: NUM_MOVED + 1], memory=self._slots.memory)

    async def decode(self, prompt: list[int]) -> Answer:
        begun_s = time.perf_counter()
        return await _generate(self._decode, prompt, begun_s, self._chunks, NUM_MOVED, self.load_s)

    async def expected(self, prompt: list[int]) -> list[int]:
        return (await _generate(self._prefill, prompt, 0.0, [], 0, [])).tokens


async def _generate(
    engine: Engine, prompt: list[int], begun_s: float, chunks: list[ChunkSink], num_loadable: int, load_s: list[float]
) -> Answer:
    spec = DecodeSpec(Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True), seed=0)
    engine.open(SequenceSpec("decode", prompt, len(prompt) + NUM_TOKENS, decode=spec, num_loadable=num_loadable))
    try:
        num_hot = await engine.hot("decode")
        if num_hot < num_loadable:
            await asyncio.gather(*(engine.load("decode", c.index, c.num_tokens, c.payload) for c in chunks))
            load_s.append(time.perf_counter() - begun_s)
        times, tokens = [], []
        async for token in engine.decode("decode", max(num_hot, num_loadable)):
            times.append(time.perf_counter())
            tokens.append(token.token)
        return Answer(times[0] - begun_s, tokens)
    finally:
        await engine.close("decode")


class Bundled:
    """Two `AsyncLLM`s with a connector that vLLM brings."""

    def __init__(self, prefill: Any, decode: Any, *, is_remote: bool) -> None:
        self._prefill = prefill
        self._decode = decode
        self._is_remote = is_remote
        self._number = 0
        self._source: dict[str, Any] | None = None
        self.load_s: list[float] = []

    async def prefill(self, prompt: list[int]) -> None:
        asked = {"do_remote_decode": True, "do_remote_prefill": False} if self._is_remote else None
        _, self._source = await self._ask(self._prefill, prompt, 1, asked)

    async def decode(self, prompt: list[int]) -> Answer:
        source, self._source = self._source, None
        answer, _ = await self._ask(self._decode, prompt, NUM_TOKENS, source)
        return answer

    async def expected(self, prompt: list[int]) -> list[int]:
        answer, _ = await self._ask(self._prefill, prompt, NUM_TOKENS, None)
        return answer.tokens

    async def _ask(
        self, llm: Any, prompt: list[int], max_tokens: int, transfer: dict[str, Any] | None
    ) -> tuple[Answer, dict[str, Any] | None]:
        from vllm import SamplingParams

        self._number += 1
        extra = {} if transfer is None else {"extra_args": {"kv_transfer_params": transfer}}
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **extra)
        begun_s, first_s, last = time.perf_counter(), None, None
        async for output in llm.generate({"prompt_token_ids": prompt}, params, f"request {self._number}"):
            first_s = first_s or time.perf_counter()
            last = output
        assert first_s is not None
        assert last is not None
        return Answer(first_s - begun_s, list(last.outputs[0].token_ids)), last.kv_transfer_params


@asynccontextmanager
async def _halfmoon() -> AsyncIterator[PairOfEngines]:
    async with AsyncExitStack() as stack:
        engines = []
        for _ in range(2):
            engines.append(build_engine("vllm", _settings()))
            stack.push_async_callback(engines[-1].stop)
            card = await engines[-1].start()
        slots = Slots(SHM / f"halfmoon-bench-{os.getpid()}", card.payload_bytes(CHUNK_TOKENS), NUM_CHUNKS)
        stack.callback(slots.close)
        yield Halfmoon(engines[0], engines[1], slots)


@asynccontextmanager
async def _bundled(name: str) -> AsyncIterator[PairOfEngines]:
    from vllm.config import KVTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    from halfmoon.engine.vllm.arguments import engine_arguments, prepare_environment
    from halfmoon.engine.vllm.config import VllmEngineConfig
    from halfmoon.models import ModelFolder

    settings = _settings()
    config = VllmEngineConfig(
        model=settings.model,
        name=settings.name,
        chunk_tokens=settings.chunk_tokens,
        threads=settings.threads,
        kv_tokens=settings.kv_tokens,
        block_tokens=settings.block_tokens,
        step_tokens=settings.step_tokens,
    )
    prepare_environment(config)
    with tempfile.TemporaryDirectory(dir=SHM) as shared:
        llms: list[Any] = []
        try:
            for number in range(2):
                arguments = engine_arguments(config, ModelFolder.open(config.model), {}, "")
                arguments.kv_events_config = None
                arguments.logits_processors = None
                if name == "example":
                    arguments.kv_transfer_config = KVTransferConfig(
                        kv_connector="ExampleConnector",
                        kv_role="kv_both",
                        kv_connector_extra_config={"shared_storage_path": shared},
                    )
                else:
                    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(_free_port())
                    arguments.kv_transfer_config = KVTransferConfig(
                        kv_connector="NixlConnector", kv_role="kv_both", kv_buffer_device="cpu", engine_id=f"e{number}"
                    )
                llms.append(await asyncio.to_thread(AsyncLLM.from_engine_args, arguments))
            yield Bundled(llms[0], llms[1], is_remote=name == "nixl")
        finally:
            for llm in llms:
                llm.shutdown()


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _measure(name: str) -> Handover:
    colds, firsts, hots = [], [], []
    is_right = True
    async with _halfmoon() if name == "halfmoon" else _bundled(name) as pair:
        for number in range(WARM_UP_ROUNDS + ROUNDS):
            prompt = random_prompt(PROMPT_TOKENS, seed=number)
            begun_s = time.perf_counter()
            await pair.prefill(prompt)
            colds.append(time.perf_counter() - begun_s)
            first = await pair.decode(prompt)
            hot = await pair.decode(prompt)
            is_right &= first.tokens == hot.tokens == await pair.expected(prompt)
            firsts.append(first.first_s)
            hots.append(hot.first_s)
        load_s = pair.load_s
    from halfmoon.engine.factory import kv_bytes_per_token

    return Handover(
        name=name,
        num_bytes=NUM_MOVED * kv_bytes_per_token("vllm", default_model(), "float32"),
        cold_ms=1000 * statistics.median(colds[WARM_UP_ROUNDS:]),
        first_ms=1000 * statistics.median(firsts[WARM_UP_ROUNDS:]),
        hot_ms=1000 * statistics.median(hots[WARM_UP_ROUNDS:]),
        load_ms=1000 * statistics.median(load_s[WARM_UP_ROUNDS:]) if load_s else None,
        is_right=is_right,
    )


def measure(name: str) -> Handover:
    """Takes about a minute and a half."""
    return asyncio.run(_measure(name))
