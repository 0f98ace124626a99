"""Preemption, aborts and failed loads cost time: never a token, a block, or a byte of memory that was given back."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

from halfmoon.engine.contract import ChunkSink, DecodeSpec, Engine, LoadFailed, SequenceClosed, SequenceSpec
from halfmoon.schemas.requests import Sampling
from support.engines import BLOCK_TOKENS, CHUNK_TOKENS, GREEDY, generated, prefilled, sinks_for, token_ids
from support.prompts import random_tokens
from support.slots import Slots, checksums
from support.vllm import Pair, answered, holds_no_blocks, llm_of, root_of
from support.wait import until_awaited

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
]

LONG = random_tokens(6 * CHUNK_TOKENS + 9, seed=500)
NUM_ABORTS = 200
NUM_AT_ONCE = 8
SCRIBBLE = b"\xa5"


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def no_blocks_are_lost(pair: Pair) -> AsyncIterator[None]:
    yield
    for engine in (pair.prefill, pair.decode):
        await until_awaited(lambda engine=engine: holds_no_blocks(engine), what="every block is free")  # type: ignore[misc]


async def test_more_than_fits_is_preempted_and_comes_out_right(pair: Pair) -> None:
    """Eight sequences that begin together and end together, and then need more blocks than there are.

    The prefill engine, which claims all that a sequence may need, says what is right.
    """
    prompts = [random_tokens(2 * CHUNK_TOKENS, seed=510 + at) for at in range(8)]
    samplings = [Sampling(temperature=at % 2, max_tokens=80, ignore_eos=True) for at in range(8)]
    num_blocks = pair.decode.stats().total_tokens // BLOCK_TOKENS
    assert num_blocks < 8 * -(-(2 * CHUNK_TOKENS + 80) // BLOCK_TOKENS)
    begun, ended = set[int](), set[int]()

    async def one(at: int) -> list[int]:
        spec = DecodeSpec(samplings[at], seed=at)
        root = root_of("preempted")
        pair.decode.open(SequenceSpec(f"d{at}", prompts[at], 2 * CHUNK_TOKENS + 80, decode=spec, root=root))
        try:
            sampled = []
            async for token in pair.decode.decode(f"d{at}", 0):
                begun.add(at)
                assert len(begun) == 8 or not ended, "all run at once"
                sampled.append(token)
            ended.add(at)
            return token_ids(sampled)
        finally:
            await pair.decode.close(f"d{at}")

    async def right() -> list[list[int]]:
        answers: list[list[int]] = []
        for first in (0, 4):
            four = range(first, first + 4)
            together = (
                generated(pair.prefill, prompts[at], samplings[at], seed=at, seq_id=f"p{at}", root=root_of("right"))
                for at in four
            )
            answers += [token_ids(answer) for answer in await asyncio.gather(*together)]
        return answers

    answers, expected = await asyncio.gather(asyncio.gather(*(one(at) for at in range(8))), right())
    assert answers == expected


async def test_a_preempted_prefill_writes_every_chunk_all_the_same(pair: Pair, slots: Slots) -> None:
    """vLLM takes the blocks away amid the prompt and begins again."""
    undisturbed = checksums(await prefilled(pair.prefill, LONG, root=root_of("undisturbed"), memory=slots.memory))
    sinks = sinks_for(pair.prefill, 0, len(LONG) - 1, slots.memory)
    pair.prefill.open(SequenceSpec("s", LONG, len(LONG), num_loadable=0, has_sinks=True, root=root_of("disturbed")))
    try:
        indexes = []
        async for chunk in pair.prefill.prefill("s", 0, len(LONG) - 1, sinks):
            indexes.append(chunk.index)
            if chunk.index in (0, 3):
                assert await llm_of(pair.prefill).reset_prefix_cache(reset_running_requests=True)
    finally:
        await pair.prefill.close("s")
    assert indexes == list(range(7))
    # The last block's rest is whatever was there, and its sums may be rounded otherwise in another step.
    assert checksums(sinks)[:6] == undisturbed[:6]


async def test_a_preempted_decode_goes_on_where_it_was(pair: Pair, slots: Slots) -> None:
    """What was loaded is lost with the blocks, and computed."""
    prompt = LONG[: 2 * CHUNK_TOKENS + 9]
    sampling = Sampling(temperature=0.8, max_tokens=12, ignore_eos=True)
    chunks = await prefilled(pair.prefill, prompt, root=root_of("undisturbed decode"), memory=slots.memory)
    undisturbed = token_ids(await generated(pair.prefill, prompt, sampling, seed=5))
    spec = DecodeSpec(sampling, seed=5)
    pair.decode.open(
        SequenceSpec("s", prompt, len(prompt) + 12, decode=spec, num_loadable=len(prompt) - 1, root=root_of("lost"))
    )
    try:
        await asyncio.gather(*(pair.decode.load("s", each.index, each.num_tokens, each.payload) for each in chunks))
        sampled = []
        async for token in pair.decode.decode("s", len(prompt) - 1):
            sampled.append(token)
            if token.position in (0, 5):
                assert await llm_of(pair.decode).reset_prefix_cache(reset_running_requests=True)
    finally:
        await pair.decode.close("s")
    assert token_ids(sampled) == undisturbed


@pytest.mark.parametrize("broken", [0, 1, 2])
async def test_what_cannot_be_loaded_is_computed(pair: Pair, slots: Slots, broken: int) -> None:
    """The file of one chunk's arena has become unreadable."""
    prompt = LONG[: 2 * CHUNK_TOKENS + 9]
    chunks = await prefilled(pair.prefill, prompt, root=root_of(f"load {broken}"), memory=slots.memory)
    _, expected = await answered(pair.prefill, prompt, root_of(f"load {broken}"))
    other = Slots(slots.path.with_name(f"{slots.path.name}-broken"), len(chunks[0].payload), 1)
    payload = other.memory(len(chunks[broken].payload))
    payload[:] = chunks[broken].payload
    other.path.unlink()
    other.path.mkdir()
    chunks[broken] = ChunkSink(broken, chunks[broken].num_tokens, payload)
    spec = DecodeSpec(GREEDY, seed=0)
    pair.decode.open(
        SequenceSpec(
            "s", prompt, len(prompt) + 6, decode=spec, num_loadable=len(prompt) - 1, root=root_of(f"failed {broken}")
        )
    )
    try:
        for chunk in chunks:
            if chunk.index == broken:
                with pytest.raises(LoadFailed, match=f"chunk {broken} could not be loaded"):
                    await pair.decode.load("s", chunk.index, chunk.num_tokens, chunk.payload)
            else:
                await pair.decode.load("s", chunk.index, chunk.num_tokens, chunk.payload)
        sampled = [token async for token in pair.decode.decode("s", broken * CHUNK_TOKENS)]
    finally:
        await pair.decode.close("s")
        other.path.rmdir()
        other.close()
    assert token_ids(sampled) == expected


@pytest.mark.parametrize("num_loaded", [0, 1, 2])
async def test_what_was_promised_and_does_not_come_is_computed(pair: Pair, slots: Slots, num_loaded: int) -> None:
    prompt = LONG[: 2 * CHUNK_TOKENS + 9]
    root = root_of(f"promised {num_loaded}")
    chunks = await prefilled(pair.prefill, prompt, root=root, memory=slots.memory)
    _, expected = await answered(pair.prefill, prompt, root)
    spec = DecodeSpec(GREEDY, seed=0)
    pair.decode.open(SequenceSpec("s", prompt, len(prompt) + 6, decode=spec, num_loadable=len(prompt) - 1, root=root))
    try:
        for chunk in chunks[:num_loaded]:
            await pair.decode.load("s", chunk.index, chunk.num_tokens, chunk.payload)
        sampled = [token async for token in pair.decode.decode("s", num_loaded * CHUNK_TOKENS)]
    finally:
        await pair.decode.close("s")
    assert token_ids(sampled) == expected


@dataclass
class Victim:
    """A sequence that is closed at a random time, or some turns of the loop after it has reached a phase."""

    engine: Engine
    seq_id: str
    root: bytes
    phase: str = "opened"
    reached: dict[str, asyncio.Event] = field(default_factory=dict)

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.event(phase).set()

    def event(self, phase: str) -> asyncio.Event:
        return self.reached.setdefault(phase, asyncio.Event())

    async def decode(self, chunks: Sequence[ChunkSink], max_tokens: int) -> None:
        num_loaded = sum(chunk.num_tokens for chunk in chunks)
        self.enter("waiting for blocks")
        await self.engine.hot(self.seq_id)
        self.enter("loading")
        for chunk in chunks:
            await self.engine.load(self.seq_id, chunk.index, chunk.num_tokens, chunk.payload)
            self.enter("loading on")
        self.enter("before the first token")
        async for token in self.engine.decode(self.seq_id, num_loaded):
            self.enter("generating" if token.position < max_tokens // 2 else "generating on")

    async def prefill(self, sinks: Sequence[ChunkSink]) -> None:
        self.enter("before the first chunk")
        async for chunk in self.engine.prefill(self.seq_id, 0, len(LONG) - 1, sinks):
            self.enter("writing" if chunk.index < len(sinks) // 2 else "writing on")


DECODE_PHASES = (
    "opened",
    "waiting for blocks",
    "loading",
    "loading on",
    "before the first token",
    "generating",
    "generating on",
)
PREFILL_PHASES = ("opened", "before the first chunk", "writing", "writing on")


@asynccontextmanager
async def doomed(
    victim: Victim, life: "asyncio.Task[None]", phase: str, generator: random.Random
) -> AsyncIterator[None]:
    """Closes the victim when its time has come; then what is in the block runs: nobody touches its memory any more."""
    try:
        if generator.random() < 0.5:
            await asyncio.wait({life}, timeout=generator.random() * 0.5)
        elif phase != "opened":
            reached = asyncio.create_task(victim.event(phase).wait())
            await asyncio.wait({life, reached}, return_when=asyncio.FIRST_COMPLETED)
            reached.cancel()
        for _ in range(generator.randrange(6)):
            await asyncio.sleep(0)
    finally:
        await victim.engine.close(victim.seq_id)
    yield
    [outcome] = await asyncio.gather(life, return_exceptions=True)
    assert outcome is None or isinstance(outcome, SequenceClosed), outcome


async def test_aborts_at_random_times_leave_nothing_behind(pair: Pair, slots: Slots) -> None:
    generator = random.Random(20)
    prompt = LONG[: 2 * CHUNK_TOKENS + 9]
    chunks = await prefilled(pair.prefill, prompt, root=root_of("abort"), memory=slots.memory)
    written = checksums(chunks)
    num_kept = slots.num_taken
    _, expected = await answered(pair.prefill, prompt, root_of("abort"))
    phases: Counter[str] = Counter()

    async def abort_decode(number: int) -> None:
        victim = Victim(pair.decode, f"victim {number}", root_of(f"abort {number // 2}"))
        spec = DecodeSpec(Sampling(temperature=0.5, max_tokens=20, ignore_eos=True), seed=number)
        num_promised = sum(chunk.num_tokens for chunk in chunks)
        given = chunks[: generator.randrange(len(chunks) + 1)]
        pair.decode.open(
            SequenceSpec(
                victim.seq_id, prompt, len(prompt) + 20, decode=spec, num_loadable=num_promised, root=victim.root
            )
        )
        life = asyncio.create_task(victim.decode(given, 20))
        async with doomed(victim, life, generator.choice(DECODE_PHASES), generator):
            phases[victim.phase] += 1

    async def abort_prefill(number: int) -> None:
        victim = Victim(pair.prefill, f"victim {number}", root_of(f"abort {number // 2}"))
        sinks = sinks_for(pair.prefill, 0, len(LONG) - 1, slots.memory)
        pair.prefill.open(
            SequenceSpec(victim.seq_id, LONG, len(LONG), num_loadable=0, has_sinks=True, root=victim.root)
        )
        life = asyncio.create_task(victim.prefill(sinks))
        async with doomed(victim, life, generator.choice(PREFILL_PHASES), generator):
            phases[victim.phase] += 1
            for sink in sinks:
                sink.payload[:] = SCRIBBLE * len(sink.payload)
            scribbled.extend(sinks)

    for first in range(0, NUM_ABORTS, NUM_AT_ONCE):
        scribbled: list[ChunkSink] = []
        victims = [
            abort_prefill(number) if number % 4 == 0 else abort_decode(number)
            for number in range(first, first + NUM_AT_ONCE)
        ]
        # Somebody who is served meanwhile notices nothing, and on both engines steps go on after the last abort.
        bystander = answered(pair.decode, prompt, root_of(f"bystander {first}"), loaded=chunks[: first % 4])
        aborts = asyncio.gather(*victims)
        assert (await bystander)[1] == expected
        await aborts
        assert await answered(pair.prefill, prompt, root_of("abort")) == (2 * CHUNK_TOKENS, expected)
        for sink in scribbled:
            assert bytes(sink.payload) == SCRIBBLE * len(sink.payload)
        assert checksums(chunks) == written
        slots.reset(num_kept)
    assert sum(phases.values()) == NUM_ABORTS
    assert set(phases) <= {*DECODE_PHASES, *PREFILL_PHASES}
    assert len(phases) >= 6, f"aborts came in too few phases to say much: {phases}"
