"""Engines in tests: started, used and stopped in a line each."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from halfmoon.engine.contract import ChunkSink, DecodeSpec, Engine, Sampled, SequenceSpec
from halfmoon.engine.factory import EngineSettings, build_engine
from halfmoon.schemas.requests import Sampling

CHUNK_TOKENS = 64
BLOCK_TOKENS = 32
"""Of the vLLM engine: its smallest on a CPU, so that a chunk has several."""
GREEDY = Sampling(temperature=0.0, max_tokens=6, ignore_eos=True)


Memory = Callable[[int], memoryview]
"""Makes room for a payload of so many bytes."""


def own_memory(num_bytes: int) -> memoryview:
    """Of this process alone."""
    return memoryview(bytearray(num_bytes))


@asynccontextmanager
async def started(
    kind: str,
    model: Path,
    *,
    kv_tokens: int = 4096,
    chunk_tokens: int = CHUNK_TOKENS,
    dtype: str = "auto",
    step_tokens: int | None = None,
    completion_reserve_tokens: int | None = None,
) -> AsyncIterator[Engine]:
    """An engine on one thread of the CPU, stopped at the end."""
    settings = EngineSettings(
        model=model,
        name="tested",
        chunk_tokens=chunk_tokens,
        device="cpu",
        dtype=dtype,
        threads=1,
        kv_tokens=kv_tokens,
        # Slow enough that a test can step in between, fast enough not to wait for.
        sim_prefill_tokens_per_s=20_000.0,
        sim_decode_step_s=0.002,
    )
    if kind == "vllm":
        settings = replace(
            settings,
            block_tokens=BLOCK_TOKENS,
            step_tokens=step_tokens,
            completion_reserve_tokens=completion_reserve_tokens,
        )
    engine = build_engine(kind, settings)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


def unshared() -> bytes:
    """A root of its own: nothing is hot under it."""
    return secrets.token_bytes(16)


def sinks_for(engine: Engine, start: int, stop: int, memory: Memory = own_memory) -> list[ChunkSink]:
    """A sink for each chunk of `[start, stop)`."""
    card = engine.card
    return [
        ChunkSink(
            index=position // card.chunk_tokens,
            num_tokens=min(card.chunk_tokens, stop - position),
            payload=memory(card.payload_bytes(min(card.chunk_tokens, stop - position))),
        )
        for position in range(start, stop, card.chunk_tokens)
    ]


async def prefilled(
    engine: Engine,
    tokens: Sequence[int],
    *,
    loaded: Sequence[ChunkSink] = (),
    seq_id: str = "prefill",
    root: bytes | None = None,
    memory: Memory = own_memory,
) -> list[ChunkSink]:
    """Chunks of all positions but the last: those given, and those computed behind them."""
    num_loaded = sum(chunk.num_tokens for chunk in loaded)
    engine.open(
        SequenceSpec(seq_id, tokens, len(tokens), num_loadable=num_loaded, has_sinks=True, root=root or unshared())
    )
    try:
        for chunk in loaded:
            await engine.load(seq_id, chunk.index, chunk.num_tokens, chunk.payload)
        start, stop = num_loaded, len(tokens) - 1
        sinks = sinks_for(engine, start, stop, memory)
        if sinks:
            async with aclosing(engine.prefill(seq_id, start, stop, sinks)) as written:  # type: ignore[type-var]
                assert [chunk.index async for chunk in written] == [sink.index for sink in sinks]
        return [*loaded, *sinks]
    finally:
        await engine.close(seq_id)


async def generated(
    engine: Engine,
    tokens: Sequence[int],
    sampling: Sampling = GREEDY,
    *,
    loaded: Sequence[ChunkSink] = (),
    seed: int = 0,
    num_known: int = 0,
    stop_tokens: frozenset[int] = frozenset(),
    seq_id: str = "decode",
    root: bytes | None = None,
) -> list[Sampled]:
    """What the engine generates after `tokens`, where the chunks given are loaded and the rest is computed."""
    max_tokens = len(tokens) + (sampling.max_tokens or 0) - num_known
    spec = DecodeSpec(sampling, seed, num_known, stop_tokens)
    num_computed = sum(chunk.num_tokens for chunk in loaded)
    engine.open(
        SequenceSpec(seq_id, tokens, max_tokens, decode=spec, num_loadable=num_computed, root=root or unshared())
    )
    try:
        await asyncio.gather(*(engine.load(seq_id, chunk.index, chunk.num_tokens, chunk.payload) for chunk in loaded))
        return [token async for token in engine.decode(seq_id, num_computed)]
    finally:
        await engine.close(seq_id)


def token_ids(sampled: Sequence[Sampled]) -> list[int]:
    """The tokens, where their positions follow each other."""
    assert [each.position for each in sampled] == list(range(sampled[0].position, sampled[0].position + len(sampled)))
    return [each.token for each in sampled]
