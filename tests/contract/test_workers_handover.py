"""From prefill to decode over two real pools: which chunks are computed, which move, and right tokens."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from halfmoon.bus.codec import Decoder
from halfmoon.bus.protocol import BusMessage
from halfmoon.prefill.config import Announce
from halfmoon.schemas import subjects
from halfmoon.schemas.requests import FinishReason
from halfmoon.schemas.splits import KvReady, Role
from halfmoon.tracing import names
from support.exact_engine import CHUNK_TOKENS, KV_BYTES_PER_TOKEN, reference
from support.workers import DECODE, SEED, Cluster, cluster, prompt

CHUNK_BYTES = CHUNK_TOKENS * KV_BYTES_PER_TOKEN
LENGTHS = [
    1,
    2,
    CHUNK_TOKENS - 1,
    CHUNK_TOKENS,
    CHUNK_TOKENS + 1,
    CHUNK_TOKENS + 2,
    2 * CHUNK_TOKENS,
    3 * CHUNK_TOKENS + 7,
]


@pytest.fixture(params=["in place", "shm", "tcp"])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Cluster]:
    host_b = "host-2" if request.param == "tcp" else "host-1"
    settings: dict[str, object] = {"read_in_place": request.param == "in place"}
    async with cluster(tmp_path, host_b=host_b, pool_settings=settings) as running:
        yield running


@pytest.fixture
def copies(request: pytest.FixtureRequest, pair: Cluster) -> bool:
    """Whether what decode reads is copied into its node's pool."""
    return bool(request.node.callspec.params["pair"] != "in place")


async def test_every_length_cold_then_cached_equals_the_reference(pair: Cluster) -> None:
    for length in LENGTHS:
        tokens = prompt(length, first=length * 11)
        expected = reference(tokens, 6, SEED)
        num_whole = length // CHUNK_TOKENS
        for cached in (False, True):
            reuse = [(pair.node_a.source,)] * num_whole if cached else []
            _, _, reader = await pair.submit(tokens, reuse=reuse)
            finished = await reader.finished()
            assert reader.tokens == expected, (length, cached)
            assert finished.finish_reason is FinishReason.LENGTH
            assert finished.seq == 6
            usage = finished.usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (length, 6)
            assert usage.cached_tokens == (num_whole * CHUNK_TOKENS if cached else 0)
        await pair.idle()
    assert pair.failures == []


async def test_a_miss_computes_all_and_decode_pulls_all(pair: Cluster, copies: bool) -> None:
    tokens = prompt(3 * CHUNK_TOKENS + 5)
    _, _, reader = await pair.submit(tokens)
    await reader.finished()
    await pair.idle()
    assert pair.prefill_engine.prefilled == [(0, len(tokens) - 1)]
    assert pair.prefill_engine.num_loads == 0
    assert pair.outcomes("prefill") == ["computed"] * 4
    assert pair.outcomes("decode") == ["hit_remote"] * 4
    assert pair.decode_engine.decoded_from == [len(tokens) - 1]
    num_bytes = (3 * CHUNK_BYTES + 4 * KV_BYTES_PER_TOKEN) if copies else 0
    pools = [await node.client.stats() for node in (pair.node_a, pair.node_b)]
    assert [pool.bytes_pulled for pool in pools] == [0, num_bytes]
    # The three whole chunks stay where they were computed; decode's working copies are gone, and so is the partial one.
    assert [pool.num_chunks for pool in pools] == [3, 0]
    ended = pair.ended_of(Role.PREFILL)[0]
    assert (ended.num_reused_tokens, ended.num_computed_tokens, ended.error) == (0, len(tokens) - 1, None)
    ended = pair.ended_of(Role.DECODE)[0]
    assert (ended.num_reused_tokens, ended.num_computed_tokens) == (len(tokens) - 1, 1)
    assert (ended.num_generated_tokens, ended.error) == (6, None)


async def test_a_local_hit_moves_nothing_and_computes_only_the_rest(pair: Cluster) -> None:
    tokens = prompt(3 * CHUNK_TOKENS + 5)
    _, _, first = await pair.submit(tokens)
    await first.finished()
    await pair.idle()
    pair.prefill_spans.clear()
    _, _, second = await pair.submit(tokens, reuse=[(pair.node_a.source,)] * 3)
    finished = await second.finished()
    await pair.idle()
    assert second.tokens == first.tokens
    assert pair.outcomes("prefill") == ["hit_local"] * 3 + ["computed"]
    assert pair.prefill_engine.prefilled[1:] == [(3 * CHUNK_TOKENS, len(tokens) - 1)]
    assert pair.prefill_engine.num_loads == 3
    assert (await pair.node_a.client.stats()).bytes_pulled == 0
    assert finished.usage.cached_tokens == 3 * CHUNK_TOKENS
    ended = pair.ended_of(Role.PREFILL)[1]
    assert (ended.num_reused_tokens, ended.num_computed_tokens) == (3 * CHUNK_TOKENS, 4)


async def test_all_cached_needs_no_engine_for_prefill(pair: Cluster) -> None:
    tokens = prompt(2 * CHUNK_TOKENS)
    for reuse in ([], [(pair.node_a.source,)] * 2):
        _, _, reader = await pair.submit(tokens, reuse=reuse)
        assert (await reader.finished()).usage.cached_tokens == len(reuse) * CHUNK_TOKENS
        assert reader.tokens == reference(tokens, 6, SEED)
        await pair.idle()
    assert pair.prefill_engine.prefilled == [(0, 2 * CHUNK_TOKENS)]
    assert pair.prefill_engine.num_loads == 0
    assert pair.decode_engine.decoded_from == [2 * CHUNK_TOKENS - 1] * 2


async def test_a_partly_remote_prefix_is_pulled_kept_and_completed(pair: Cluster, tmp_path: Path) -> None:
    """The first two chunks are on decode's node only: as left by a colocated worker, or an eviction on node-a."""
    tokens = prompt(3 * CHUNK_TOKENS + 2)
    _, _, first = await pair.submit(tokens[: 2 * CHUNK_TOKENS])
    await first.finished()
    await pair.idle()
    wanted = pair.node_a.service.store
    metas = [slot.meta for slot in wanted.ledger.slots.registered()]
    assert len(metas) == 2
    await pair.move_to_b(tokens[: 2 * CHUNK_TOKENS])
    before = await pair.node_a.client.stats()
    assert before.num_chunks == 0
    pair.prefill_spans.clear()
    _, _, second = await pair.submit(tokens, reuse=[(pair.node_b.source,)] * 2)
    finished = await second.finished()
    await pair.idle()
    assert second.tokens == reference(tokens, 6, SEED)
    assert pair.outcomes("prefill") == ["hit_remote"] * 2 + ["computed"] * 2
    assert finished.usage.cached_tokens == 2 * CHUNK_TOKENS
    after = await pair.node_a.client.stats()
    assert after.bytes_pulled - before.bytes_pulled == 2 * CHUNK_BYTES
    assert after.num_chunks == 3
    moved = [
        span
        for span in pair.chunk_spans("prefill")
        if (span.attributes or {})["halfmoon.chunk.outcome"] == "hit_remote"
    ]
    for index, span in enumerate(moved):
        facts = span.attributes or {}
        assert (facts["halfmoon.chunk.source"], facts["halfmoon.chunk.destination"]) == ("node-b", "node-a")
        assert (facts["halfmoon.chunk.index"], facts["halfmoon.chunk.bytes"]) == (index, CHUNK_BYTES)
        assert facts["halfmoon.chunk.transport"] in ("shm", "tcp")
        assert isinstance(facts["halfmoon.chunk.transfer_ms"], float)
        assert isinstance(facts["halfmoon.chunk.queue_wait_ms"], float)


async def test_spans_of_one_request(pair: Cluster) -> None:
    _, half, reader = await pair.submit(prompt(CHUNK_TOKENS + 3))
    await reader.finished()
    await pair.idle()
    prefill, decode = pair.prefill_spans.get_finished_spans(), pair.decode_spans.get_finished_spans()
    assert {span.name for span in prefill} == {
        names.PREFILL_REQUEST,
        names.PREFILL_QUEUE,
        names.PREFILL_COMPUTE,
        names.CHUNK,
    }
    assert {span.name for span in decode} == {
        names.DECODE_REQUEST,
        names.DECODE_QUEUE,
        names.DECODE_WAIT_KV,
        names.DECODE_GENERATE,
        names.CHUNK,
    }
    for spans, root_name in ((prefill, names.PREFILL_REQUEST), (decode, names.DECODE_REQUEST)):
        root = next(span for span in spans if span.name == root_name)
        assert (root.attributes or {})["halfmoon.request_id"] == half.request_id
        by_id = {span.context.span_id: span for span in spans}
        for span in spans:
            assert span.context.trace_id == root.context.trace_id
            parent = by_id[span.parent.span_id] if span.parent and span.parent.span_id in by_id else None
            expected = {names.CHUNK: (names.PREFILL_COMPUTE, names.DECODE_WAIT_KV)}.get(span.name, (root_name,))
            assert span is root or (parent is not None and parent.name in expected), span.name
    generate = next(span for span in decode if span.name == names.DECODE_GENERATE)
    assert (generate.attributes or {})["gen_ai.usage.output_tokens"] == 6
    chunk = pair.chunk_spans("prefill")[0]
    assert (chunk.start_time, chunk.end_time) == (2_000, 3_000), "the engine's own times"


@pytest.mark.parametrize("announce", Announce)
async def test_decode_is_told_of_chunks_as_the_setting_says(tmp_path: Path, announce: Announce) -> None:
    """`each`: as they come, and together only those that came while others were committed."""
    tokens = prompt(3 * CHUNK_TOKENS + 5)
    decoder: Decoder[KvReady] = Decoder(KvReady)
    told: list[int] = []
    async with cluster(tmp_path, prefill_settings={"announce": announce}) as pair:

        async def on_ready(message: BusMessage) -> None:
            told.append(len(decoder.decode(message.data, message.headers).chunks))

        await pair.bus.subscribe(subjects.kv_ready(DECODE), on_ready)
        _, _, reader = await pair.submit(tokens)
        await reader.finished()
        assert reader.tokens == reference(tokens, 6, SEED)
        await pair.idle()
        assert pair.outcomes("decode") == ["hit_remote"] * 4
    assert sum(told) == 4
    assert (len(told) == 1) == (announce is Announce.END)
