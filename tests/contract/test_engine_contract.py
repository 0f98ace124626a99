"""What every engine promises (`halfmoon.engine.contract`), on each engine."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

import pytest
import pytest_asyncio

from halfmoon.engine.contract import (
    ChunkSink,
    DecodeSpec,
    Engine,
    EngineError,
    EngineFull,
    SequenceClosed,
    SequenceSpec,
)
from halfmoon.schemas.requests import Sampling
from support.engines import CHUNK_TOKENS, GREEDY, generated, prefilled, sinks_for, started, token_ids
from support.model import small_model
from support.prompts import random_tokens
from support.wait import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

KV_TOKENS = 1024
LONG = random_tokens(2 * CHUNK_TOKENS + 9, seed=1)
SHORT = random_tokens(CHUNK_TOKENS + 5, seed=2)
ENDLESS = DecodeSpec(Sampling(temperature=0.0, max_tokens=100_000), seed=0)


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["sim", pytest.param("torch", marks=pytest.mark.model), pytest.param("vllm", marks=pytest.mark.vllm)],
)
async def loaded_engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    async with started(request.param, small_model(), kv_tokens=KV_TOKENS) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def engine(loaded_engine: Engine) -> AsyncIterator[Engine]:
    """One engine for all tests; each leaves it as it found it."""
    assert loaded_engine.stats().free_tokens == KV_TOKENS
    yield loaded_engine
    after = loaded_engine.stats()
    assert after.free_tokens == after.total_tokens == KV_TOKENS
    assert after.running == after.waiting == 0


@asynccontextmanager
async def opened(
    engine: Engine, tokens: list[int], max_tokens: int | None = None, seq_id: str = "s"
) -> AsyncIterator[str]:
    engine.open(SequenceSpec(seq_id, tokens, max_tokens or len(tokens), decode=ENDLESS))
    try:
        yield seq_id
    finally:
        await engine.close(seq_id)


def decoding(engine: Engine, seq_id: str) -> "Collector":
    return Collector(engine.decode(seq_id, 0))


class Collector:
    """Reads an iterator in a task of its own."""

    def __init__(self, iterator: AsyncIterator[object]) -> None:
        self.items: list[object] = []
        self.task = asyncio.create_task(self._read(iterator))

    async def _read(self, iterator: AsyncIterator[object]) -> None:
        async for item in iterator:
            self.items.append(item)

    async def at_least(self, count: int) -> None:
        await until(lambda: len(self.items) >= count or self.task.done(), what=f"{count} items")
        assert len(self.items) >= count, self.task.exception() if self.task.done() else None


async def test_card(engine: Engine) -> None:
    card = engine.card
    assert card.chunk_tokens == CHUNK_TOKENS
    assert card.max_model_tokens == KV_TOKENS
    assert card.vocab_size == 49_152
    assert len(bytes.fromhex(card.fingerprint)) == 32
    assert card.kv_bytes_per_token > 0


async def test_open_is_all_or_nothing(engine: Engine) -> None:
    async with opened(engine, SHORT, KV_TOKENS - 64):
        free = engine.stats().free_tokens
        assert free == 64
        with pytest.raises(EngineFull) as full:
            engine.open(SequenceSpec("t", [5], 65))
        assert (full.value.needed_tokens, full.value.free_tokens) == (65, 64)
        assert engine.stats().free_tokens == free
        engine.open(SequenceSpec("t", [5], 64))
        assert engine.stats().free_tokens == 0
        await engine.close("t")
        assert engine.stats().free_tokens == free


@pytest.mark.parametrize(
    ("tokens", "max_tokens"), [([5], KV_TOKENS + 1), ([], 5), ([5, 6, 7], 2)], ids=["too long", "empty", "no room"]
)
async def test_a_spec_that_can_never_fit_is_refused(engine: Engine, tokens: list[int], max_tokens: int) -> None:
    with pytest.raises(ValueError, match=r"fit|token"):
        engine.open(SequenceSpec("s", tokens, max_tokens))


async def test_an_id_is_used_once_at_a_time(engine: Engine) -> None:
    async with opened(engine, SHORT):
        with pytest.raises(ValueError, match="open already"):
            engine.open(SequenceSpec("s", SHORT, len(SHORT)))
    async with opened(engine, SHORT):
        assert engine.stats().waiting == 1


async def test_chunks_are_written_in_order_and_in_time(engine: Engine) -> None:
    sinks = sinks_for(engine, 0, len(LONG))
    async with opened(engine, LONG) as seq_id:
        written = [chunk async for chunk in engine.prefill(seq_id, 0, len(LONG), sinks)]
    assert [chunk.index for chunk in written] == [0, 1, 2]
    assert all(0 < chunk.started_ns <= chunk.finished_ns for chunk in written)
    assert [chunk.finished_ns for chunk in written] == sorted(chunk.finished_ns for chunk in written)
    assert all(any(sink.payload) for sink in sinks)


async def test_kv_is_that_of_the_tokens_up_to_it(engine: Engine) -> None:
    """Equal prefixes make equal chunks; a different token changes its chunk and all behind it, and none before."""
    other = [*LONG]
    other[CHUNK_TOKENS + 3] += 1
    ours, again = await prefilled(engine, LONG), await prefilled(engine, LONG)
    theirs = await prefilled(engine, other)
    assert [bytes(chunk.payload) for chunk in ours] == [bytes(chunk.payload) for chunk in again]
    assert [mine.payload == yours.payload for mine, yours in zip(ours, theirs, strict=True)] == [True, False, False]


async def test_what_is_loaded_is_what_was_computed(engine: Engine) -> None:
    chunks = await prefilled(engine, LONG)
    cold = token_ids(await generated(engine, LONG))
    for loaded in (chunks, chunks[:1]):
        assert token_ids(await generated(engine, LONG, loaded=loaded)) == cold
    behind = await prefilled(engine, LONG, loaded=chunks[:2])
    assert token_ids(await generated(engine, LONG, loaded=behind)) == cold
    damaged = [*chunks]
    damaged[1] = ChunkSink(1, CHUNK_TOKENS, memoryview(bytes(len(chunks[1].payload))))
    assert token_ids(await generated(engine, LONG, loaded=damaged)) != cold


async def test_read_only_payloads_can_be_loaded(engine: Engine) -> None:
    chunks = await prefilled(engine, SHORT)
    frozen = [ChunkSink(each.index, each.num_tokens, memoryview(bytes(each.payload))) for each in chunks]
    assert token_ids(await generated(engine, SHORT, loaded=frozen)) == token_ids(await generated(engine, SHORT))


async def test_sequences_side_by_side_say_what_they_say_alone(engine: Engine) -> None:
    prompts = [random_tokens(count, seed=50 + count) for count in (1, 20, CHUNK_TOKENS, CHUNK_TOKENS + 1, 130)]
    alone = [token_ids(await generated(engine, prompt)) for prompt in prompts]
    together = await asyncio.gather(
        *(generated(engine, prompt, seq_id=f"s{at}") for at, prompt in enumerate(prompts)),
        prefilled(engine, LONG, seq_id="p"),
    )
    assert [token_ids(answer) for answer in together[:-1]] == alone  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [-1, 1])
async def test_payloads_of_the_wrong_size_are_refused(engine: Engine, change: int) -> None:
    size = engine.card.payload_bytes(CHUNK_TOKENS) + change
    async with opened(engine, SHORT) as seq_id:
        with pytest.raises(ValueError, match="bytes"):
            await engine.load(seq_id, 0, CHUNK_TOKENS, memoryview(bytearray(size)))


async def test_chunks_behind_the_prompt_are_refused(engine: Engine) -> None:
    payload = memoryview(bytearray(engine.card.payload_bytes(CHUNK_TOKENS)))
    async with opened(engine, SHORT) as seq_id:
        with pytest.raises(ValueError, match="ends at 128"):
            await engine.load(seq_id, 1, CHUNK_TOKENS, payload)


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 1000), (0, CHUNK_TOKENS - 1), (CHUNK_TOKENS, CHUNK_TOKENS), (1, len(SHORT))]
)
async def test_sinks_that_dont_cover_the_range_are_refused(engine: Engine, start: int, stop: int) -> None:
    sinks = sinks_for(engine, 0, len(SHORT))
    async with opened(engine, SHORT) as seq_id:
        with pytest.raises(ValueError, match="sink"):
            await anext(engine.prefill(seq_id, start, stop, sinks))


async def test_sinks_of_the_wrong_size_are_refused(engine: Engine) -> None:
    """Before anything is computed: an engine must not find out half-way."""
    [first, second] = sinks_for(engine, 0, len(SHORT))
    short = ChunkSink(1, second.num_tokens, second.payload[:-1])
    async with opened(engine, SHORT) as seq_id:
        with pytest.raises(ValueError, match="bytes"):
            await anext(engine.prefill(seq_id, 0, len(SHORT), [first, short]))
        assert not any(first.payload)
    assert token_ids(await generated(engine, [5], GREEDY)), "the engine goes on"


@pytest.mark.parametrize("num_computed", [-1, len(SHORT), len(SHORT) + 1])
async def test_decode_leaves_itself_a_token(engine: Engine, num_computed: int) -> None:
    async with opened(engine, SHORT, 200) as seq_id:
        with pytest.raises(ValueError, match="at least one"):
            await anext(engine.decode(seq_id, num_computed))
        assert token_ids([await anext(engine.decode(seq_id, 0))]), "a refusal leaves the sequence usable"


async def test_a_sequence_is_computed_once_at_a_time(engine: Engine) -> None:
    async with opened(engine, SHORT, KV_TOKENS) as seq_id:
        reader = decoding(engine, seq_id)
        await reader.at_least(1)
        with pytest.raises(ValueError, match="already"):
            await anext(engine.decode(seq_id, 0))
        await engine.close(seq_id)
        with pytest.raises(SequenceClosed):
            await reader.task


async def test_decode_ends_at_max_tokens_at_stop_tokens_and_where_the_kv_is_full(engine: Engine) -> None:
    tokens = token_ids(await generated(engine, SHORT))
    assert len(tokens) == 6
    stopped = await generated(engine, SHORT, stop_tokens=frozenset({tokens[3]}))
    assert token_ids(stopped) == tokens[: tokens.index(tokens[3]) + 1]
    async with opened(engine, SHORT, len(SHORT) + 4) as seq_id:
        full = [token async for token in engine.decode(seq_id, 0)]
    assert token_ids(full) == tokens[:4]


async def test_a_consumer_may_leave_at_any_time(engine: Engine) -> None:
    async with opened(engine, LONG) as seq_id:
        written = engine.prefill(seq_id, 0, len(LONG), sinks_for(engine, 0, len(LONG)))
        async with aclosing(written):  # type: ignore[type-var]
            assert (await anext(written)).index == 0
    async with opened(engine, SHORT, KV_TOKENS) as seq_id:
        assert (await anext(engine.decode(seq_id, 0))).position == 0


async def test_unknown_sequences_are_closed_ones(engine: Engine) -> None:
    payload = memoryview(bytearray(engine.card.payload_bytes(CHUNK_TOKENS)))
    with pytest.raises(SequenceClosed):
        await engine.load("none", 0, CHUNK_TOKENS, payload)
    with pytest.raises(SequenceClosed):
        await anext(engine.prefill("none", 0, 1, sinks_for(engine, 0, 1)))
    with pytest.raises(SequenceClosed):
        await anext(engine.decode("none", 0))
    await engine.close("none")


async def begin_nothing(engine: Engine) -> "Collector | None":
    return None


async def begin_load(engine: Engine) -> "Collector | None":
    payload = memoryview(bytearray(engine.card.payload_bytes(CHUNK_TOKENS)))

    async def loads() -> AsyncIterator[object]:
        while True:
            await engine.load("s", 0, CHUNK_TOKENS, payload)
            yield None
            await asyncio.sleep(0)

    reader = Collector(loads())
    await reader.at_least(1)
    return reader


async def begin_prefill(engine: Engine) -> "Collector | None":
    reader = Collector(engine.prefill("s", 0, len(LONG), sinks_for(engine, 0, len(LONG))))
    await until(lambda: engine.stats().running == 1)
    return reader


async def begin_prefill_and_get_a_chunk(engine: Engine) -> "Collector | None":
    iterator = engine.prefill("s", 0, len(LONG), sinks_for(engine, 0, len(LONG)))
    assert await anext(iterator)
    return None


async def begin_decode(engine: Engine) -> "Collector | None":
    reader = decoding(engine, "s")
    await until(lambda: engine.stats().running == 1)
    return reader


async def begin_decode_and_get_tokens(engine: Engine) -> "Collector | None":
    reader = decoding(engine, "s")
    await reader.at_least(2)
    return reader


@pytest.mark.parametrize(
    "begin",
    [
        begin_nothing,
        begin_load,
        begin_prefill,
        begin_prefill_and_get_a_chunk,
        begin_decode,
        begin_decode_and_get_tokens,
    ],
)
async def test_close_in_each_phase(engine: Engine, begin: Callable[[Engine], Awaitable["Collector | None"]]) -> None:
    engine.open(SequenceSpec("s", LONG, KV_TOKENS, decode=ENDLESS))
    reader = await begin(engine)
    await asyncio.gather(engine.close("s"), engine.close("s"))
    assert engine.stats().free_tokens == KV_TOKENS
    await engine.close("s")
    if reader is not None:
        with pytest.raises(SequenceClosed):
            await asyncio.wait_for(reader.task, 5)
    with pytest.raises(SequenceClosed):
        await anext(engine.decode("s", 0))
    assert token_ids(await generated(engine, SHORT, seq_id="s")), "the id can be used again"


async def test_sinks_are_untouched_after_close(engine: Engine) -> None:
    """Whenever the sequence is closed, its sinks belong to the caller again."""
    for num_written in range(2):
        sinks = sinks_for(engine, 0, len(LONG))
        engine.open(SequenceSpec("s", LONG, len(LONG)))
        reader = Collector(engine.prefill("s", 0, len(LONG), sinks))
        await until(lambda reader=reader, wanted=num_written: len(reader.items) >= wanted)  # type: ignore[misc]
        await engine.close("s")
        for sink in sinks:
            sink.payload[:] = b"\xa5" * len(sink.payload)
        await asyncio.gather(reader.task, return_exceptions=True)
        assert token_ids(await generated(engine, SHORT, seq_id="other")), "steps go on"
        assert all(bytes(sink.payload) == b"\xa5" * len(sink.payload) for sink in sinks)
        for sink in sinks:
            sink.payload.release()  # fails where somebody still holds the memory


async def test_a_cancelled_close_closes_all_the_same(engine: Engine) -> None:
    engine.open(SequenceSpec("s", LONG, KV_TOKENS, decode=ENDLESS))
    reader = decoding(engine, "s")
    await reader.at_least(1)
    closing = asyncio.create_task(engine.close("s"))
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    await until(lambda: engine.stats().free_tokens == KV_TOKENS)
    with pytest.raises(SequenceClosed):
        await reader.task


async def test_close_of_one_leaves_the_others_alone(engine: Engine) -> None:
    alone = token_ids(await generated(engine, SHORT))
    engine.open(SequenceSpec("doomed", LONG, 600, decode=ENDLESS))
    doomed = decoding(engine, "doomed")
    other = asyncio.create_task(generated(engine, SHORT, seq_id="other"))
    await doomed.at_least(1)
    await engine.close("doomed")
    assert token_ids(await other) == alone
    with pytest.raises(SequenceClosed):
        await doomed.task


async def test_a_cancelled_load_is_waited_for(engine: Engine) -> None:
    payload = bytearray(engine.card.payload_bytes(CHUNK_TOKENS))
    async with opened(engine, SHORT) as seq_id:
        view = memoryview(payload)
        load = asyncio.create_task(engine.load(seq_id, 0, CHUNK_TOKENS, view))
        await asyncio.sleep(0)
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
    del load
    view.release()  # fails where somebody still holds the memory


# vLLM, whose start takes half a minute, is asked this when its tests end: tests/engine_vllm/conftest.py.
@pytest.mark.parametrize("kind", ["sim", pytest.param("torch", marks=pytest.mark.model)])
async def test_stop_closes_everything_and_is_idempotent(kind: str) -> None:
    async with started(kind, small_model(), kv_tokens=KV_TOKENS) as engine:
        engine.open(SequenceSpec("s", LONG, KV_TOKENS, decode=ENDLESS))
        reader = decoding(engine, "s")
        await reader.at_least(1)
        await asyncio.gather(engine.stop(), engine.stop())
        with pytest.raises(SequenceClosed):
            await reader.task
        with pytest.raises(EngineError):
            engine.open(SequenceSpec("t", SHORT, len(SHORT)))
        await engine.stop()


@pytest.mark.parametrize("kind", ["sim", "torch", pytest.param("vllm", marks=pytest.mark.vllm)])
async def test_before_start_there_is_nothing(kind: str) -> None:
    from halfmoon.engine.factory import EngineSettings, build_engine

    engine = build_engine(kind, EngineSettings(model=small_model(), name="tested", chunk_tokens=CHUNK_TOKENS))
    with pytest.raises(EngineError):
        _ = engine.card
    with pytest.raises(EngineError):
        engine.open(SequenceSpec("s", SHORT, len(SHORT)))
    await engine.close("s")
    await engine.stop()
