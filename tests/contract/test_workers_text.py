"""What a reader gets from decode: text, stops, encodings, numbers; and the same again after a change of workers."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgpack
import msgspec
import pytest

from halfmoon.schemas.requests import Encoding, FinishReason, Sampling, Tokens
from halfmoon.schemas.splits import DecodeHalf, Role
from halfmoon.schemas.wire import HEADER_CONTENT_TYPE
from halfmoon.text import TextCodec
from support.exact_engine import CHUNK_TOKENS, reference
from support.wait import until
from support.workers import DECODE, SEED, Cluster, Reader, cluster

TOKENS = [40 + place for place in range(CHUNK_TOKENS + 3)]
"""ASCII, so that the prompt ends with a whole character."""


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as running:
        yield running


@pytest.fixture
def codec(pair: Cluster, tmp_path: Path) -> TextCodec:
    return TextCodec.load(tmp_path / "model")


def say(pair: Cluster, tokens: Sequence[int]) -> None:
    """Make the engine generate these tokens, and then others."""
    pair.decode_engine.choose = lambda position: tokens[position] if position < len(tokens) else None


def spell(codec: TextCodec, text: str) -> list[int]:
    """The text as one token per byte: every border is inside or between characters."""
    by_byte = {codec.token_bytes(token): token for token in range(2, 258)}
    return [by_byte[bytes([byte])] for byte in text.encode()]


async def complete(pair: Cluster, sampling: Sampling, **settings: object) -> tuple[DecodeHalf, Reader]:
    _, half, reader = await pair.submit(TOKENS, sampling=sampling, **settings)  # type: ignore[arg-type]
    await reader.terminal()
    await pair.idle()
    assert len(reader.terminals) == 1
    return half, reader


async def test_one_token_is_exactly_one(pair: Cluster) -> None:
    _, reader = await complete(pair, Sampling(max_tokens=1))
    finished = await reader.finished()
    assert reader.tokens == reference(TOKENS, 1, SEED)
    assert finished.finish_reason is FinishReason.LENGTH
    assert (finished.seq, finished.usage.completion_tokens, finished.usage.total_tokens) == (1, 1, len(TOKENS) + 1)


async def test_a_prompt_of_one_token(pair: Cluster) -> None:
    _, _, reader = await pair.submit([5], sampling=Sampling(max_tokens=3))
    finished = await reader.finished()
    assert reader.tokens == reference([5], 3, SEED)
    assert finished.usage.prompt_tokens == 1
    assert finished.usage.cached_tokens == 0


async def test_no_limit_means_what_the_context_leaves(pair: Cluster) -> None:
    _, reader = await complete(pair, Sampling())
    finished = await reader.finished()
    assert finished.usage.total_tokens == 1024
    assert finished.finish_reason is FinishReason.LENGTH
    assert reader.tokens == reference(TOKENS, 1024 - len(TOKENS), SEED)


@pytest.mark.parametrize("text", ["moon 🌙 light", "👩‍🚀🚀", "ünïcödé ✓", "🌙"])
async def test_characters_split_over_tokens_come_whole(pair: Cluster, codec: TextCodec, text: str) -> None:
    tokens = spell(codec, text)
    say(pair, tokens)
    _, reader = await complete(pair, Sampling(max_tokens=len(tokens)))
    assert reader.tokens == tokens
    assert reader.text == text
    assert all("\ufffd" not in event.text for event in reader.events if isinstance(event, Tokens))


async def test_a_stop_string_across_token_borders(pair: Cluster, codec: TextCodec) -> None:
    tokens = spell(codec, "one two three")
    say(pair, tokens)
    _, reader = await complete(pair, Sampling(max_tokens=50, stop=("o th", "never")))
    finished = await reader.finished()
    assert reader.text == "one tw"
    assert finished.finish_reason is FinishReason.STOP
    # Generated, so counted, up to the token that completes the stop string.
    assert finished.usage.completion_tokens == len(spell(codec, "one two th")) == len(reader.tokens)


async def test_what_only_looked_like_a_stop_string_is_shown_at_the_end(pair: Cluster, codec: TextCodec) -> None:
    tokens = spell(codec, "one tw")
    say(pair, tokens)
    _, reader = await complete(pair, Sampling(max_tokens=len(tokens), stop=("two",)))
    finished = await reader.finished()
    assert reader.text == "one tw"
    assert finished.text == "tw"
    assert finished.finish_reason is FinishReason.LENGTH


async def test_end_of_sequence_ends_and_does_not_show(pair: Cluster, codec: TextCodec) -> None:
    (eos,) = codec.eos_tokens
    tokens = [*spell(codec, "moon"), eos]
    say(pair, tokens)
    _, reader = await complete(pair, Sampling(max_tokens=50))
    finished = await reader.finished()
    assert reader.text == "moon"
    assert reader.tokens == tokens
    assert (finished.finish_reason, finished.usage.completion_tokens) == (FinishReason.STOP, 5)


async def test_end_of_sequence_may_be_ignored(pair: Cluster, codec: TextCodec) -> None:
    (eos,) = codec.eos_tokens
    tokens = [*spell(codec, "moon"), eos, *spell(codec, "light")]
    say(pair, tokens)
    _, reader = await complete(pair, Sampling(max_tokens=len(tokens), ignore_eos=True))
    finished = await reader.finished()
    assert reader.text == "moonlight"
    assert (finished.finish_reason, finished.usage.completion_tokens) == (FinishReason.LENGTH, len(tokens))


async def test_logprobs_are_one_for_each_token_with_their_texts(pair: Cluster, codec: TextCodec) -> None:
    tokens = spell(codec, "moon")
    say(pair, tokens)
    _, reader = await complete(pair, Sampling(max_tokens=4, logprobs=2))
    logprobs = [entry for event in reader.events if isinstance(event, Tokens) for entry in event.logprobs or ()]
    assert [entry.token for entry in logprobs] == tokens
    assert [entry.text for entry in logprobs] == list("moon")
    assert [[top.text for top in entry.top] for entry in logprobs] == [[letter] * 2 for letter in "moon"]


async def test_without_logprobs_there_are_none(pair: Cluster) -> None:
    _, reader = await complete(pair, Sampling(max_tokens=4))
    assert all(event.logprobs is None for event in reader.events if isinstance(event, Tokens))


async def test_events_in_json(pair: Cluster) -> None:
    half, reader = await complete(pair, Sampling(max_tokens=4), encoding=Encoding.JSON)
    documents = [msgspec.json.decode(message.data) for message in reader.messages]
    assert {message.headers[HEADER_CONTENT_TYPE] for message in reader.messages} == {"application/json"}
    assert {document["request_id"] for document in documents} == {half.request_id}
    assert [document["type"] for document in documents][-1] == "finished.v1"
    assert documents[-1]["usage"] == {"prompt_tokens": len(TOKENS), "completion_tokens": 4}


async def test_events_in_messagepack_for_any_client(pair: Cluster) -> None:
    _, reader = await complete(pair, Sampling(max_tokens=4))
    documents = [msgpack.unpackb(message.data) for message in reader.messages]
    assert {message.headers[HEADER_CONTENT_TYPE] for message in reader.messages} == {"application/msgpack"}
    assert [token for document in documents[:-1] for token in document["tokens"]] == reference(TOKENS, 4, SEED)


@pytest.mark.parametrize("num_known", [1, 4, 9, 11])
async def test_a_continuation_goes_on_where_the_first_worker_was(
    pair: Cluster, codec: TextCodec, num_known: int
) -> None:
    """For a reader, the known part's text is with the first worker; what it held back comes from the second."""
    tokens = spell(codec, "a moon 🌙 stop!")
    say(pair, tokens)
    sampling = Sampling(max_tokens=30, stop=("stop",))
    _, whole = await complete(pair, sampling)
    _, first = await complete(pair, msgspec.structs.replace(sampling, max_tokens=30))
    shown = "".join(text_of(first, seq) for seq in range(num_known))
    _, second = await complete(pair, sampling, known=tokens[:num_known])
    finished = await second.finished()
    assert second.tokens == whole.tokens[num_known:]
    events = [event for event in second.events if isinstance(event, Tokens)]
    assert events[0].seq == num_known
    assert all(len(event.tokens) == 1 for event in events), "so that a reader can drop each that it has seen"
    assert shown + second.text == whole.text == "a moon 🌙 "
    assert finished.usage.completion_tokens == len(whole.tokens)
    assert finished.usage.prompt_tokens == len(TOKENS)


def text_of(reader: Reader, seq: int) -> str:
    """What the token with this number added to the text; the reader must have got them one by one."""
    for event in reader.events:
        if isinstance(event, Tokens) and event.seq == seq:
            assert len(event.tokens) == 1
            return event.text
    return ""


async def test_a_continuation_of_what_was_complete_ends_at_once(pair: Cluster, codec: TextCodec) -> None:
    (eos,) = codec.eos_tokens
    for sampling, known, reason in (
        (Sampling(max_tokens=4), spell(codec, "moon"), FinishReason.LENGTH),
        (Sampling(max_tokens=9), [*spell(codec, "moon"), eos], FinishReason.STOP),
        (Sampling(max_tokens=9, stop=("oo",)), spell(codec, "moo"), FinishReason.STOP),
    ):
        _, reader = await complete(pair, sampling, known=known)
        finished = await reader.finished()
        assert reader.tokens == []
        assert (finished.seq, finished.text, finished.finish_reason) == (len(known), "", reason)
    assert pair.decode_engine.decoded_from == []


async def test_heartbeats_tell_tokens_once_they_are_out(pair: Cluster) -> None:
    _, _, cold = await pair.submit(TOKENS)
    await cold.finished()
    await pair.idle()
    pair.beating.discard(DECODE)  # Each beat tells what is new: here they are looked at one by one.
    num_steps = pair.decode_engine.at["decode"]
    gate = pair.decode_engine.hold("decode")
    reuse = [(pair.node_a.source,)] * (len(TOKENS) // CHUNK_TOKENS)
    _, half, reader = await pair.submit(TOKENS, sampling=Sampling(max_tokens=5), reuse=reuse)
    await until(lambda: pair.decode_engine.at["decode"] == num_steps + 1)
    assert [(entry.num_tokens, entry.new_tokens) for entry in pair.decode.heartbeat().requests] == [(0, ())]
    run = pair.decode._runs[half.transfer_id]
    gate.set()
    await reader.finished()
    first, second = run.progress(), run.progress()
    assert (first.num_tokens, first.new_tokens) == (5, tuple(reader.tokens))
    assert (second.num_tokens, second.new_tokens) == (5, ())
    # What another decode worker, that goes on from here, is to tell the client.
    assert first.cached_tokens == second.cached_tokens == len(reuse) * CHUNK_TOKENS > 0
    await pair.idle()
    assert pair.decode.heartbeat().requests == ()
    assert pair.ended_of(Role.DECODE)[1].num_generated_tokens == 5
