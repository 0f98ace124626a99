"""What tests of the vLLM engine share."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from halfmoon.engine.contract import ChunkSink, DecodeSpec, Engine, SequenceSpec
from halfmoon.schemas.requests import Sampling
from support.engines import GREEDY, token_ids

if TYPE_CHECKING:  # there may be no vLLM
    from halfmoon.engine.vllm import VllmEngine


@dataclass(frozen=True, slots=True)
class Pair:
    prefill: Engine
    decode: Engine


def root_of(name: str) -> bytes:
    """A root of its own: nothing is hot that was computed under another one."""
    return hashlib.sha256(name.encode()).digest()


async def answered(
    engine: Engine,
    tokens: Sequence[int],
    root: bytes,
    sampling: Sampling = GREEDY,
    *,
    loaded: Sequence[ChunkSink] = (),
    seq_id: str = "answered",
) -> tuple[int, list[int]]:
    """How many tokens were hot, and what the engine generates: as a worker does it, which loads what isn't hot."""
    num_loaded = sum(chunk.num_tokens for chunk in loaded)
    assert sampling.max_tokens is not None
    spec = DecodeSpec(sampling, seed=0)
    engine.open(
        SequenceSpec(seq_id, tokens, len(tokens) + sampling.max_tokens, decode=spec, num_loadable=num_loaded, root=root)
    )
    try:
        num_hot = await engine.hot(seq_id)
        start = 0
        for chunk in loaded:
            start += chunk.num_tokens
            if start > num_hot:
                await engine.load(seq_id, chunk.index, chunk.num_tokens, chunk.payload)
        sampled = [token async for token in engine.decode(seq_id, max(num_hot, num_loaded))]
        return num_hot, token_ids(sampled)
    finally:
        await engine.close(seq_id)


def llm_of(engine: Engine) -> Any:
    """vLLM's own `AsyncLLM` under the engine, to disturb it and to look at it from behind."""
    return cast("VllmEngine", engine)._processes.llm


async def holds_no_blocks(engine: Engine) -> bool:
    """Whether no request holds a block: only then does vLLM forget its prefix cache."""
    return bool(await llm_of(engine).reset_prefix_cache())
