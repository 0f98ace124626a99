"""Chunk-size advice: small traces worked out by hand, and what must hold for any."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.chunks.plan import plan_chunks
from halfmoon.planner.chunk_advice import CHUNK_SIZES, ChunkAdvice, Costs, Range, advise_chunks, handed_over
from halfmoon.planner.traced import Shared, shared_prefixes
from halfmoon.schemas.ids import TransferId
from halfmoon.traces import TracedRequest
from halfmoon.traces.recording import BLOCK_TOKENS, BlockHasher

FREE = Costs(chunk_s=0.0)


def request(prompt_tokens: int, *blocks: int, group: str = "") -> TracedRequest:
    return TracedRequest(at_ms=0, prompt_tokens=prompt_tokens, blocks=blocks, group=group)


def advise(requests: Sequence[TracedRequest], block_tokens: int | None, costs: Costs = FREE) -> ChunkAdvice:
    return advise_chunks(requests, block_tokens=block_tokens, kv_bytes_per_token=1000, costs=costs)


def test_shared_prefixes_are_known_to_within_a_block() -> None:
    requests = [
        request(1000, 1, 2),  # nothing came before
        request(1000, 1, 2),  # the same
        request(1200, 1, 3, 4),  # one block, and up to 488 tokens of the 488 behind it
        request(600, 1, 9),  # one block; its last 88 tokens may all be shared
        request(600, 7, 8),  # another begin: 511 tokens at most
    ]
    assert shared_prefixes(requests, 512) == [
        Shared(0, 0),
        Shared(1000, 1000),
        Shared(512, 1000),
        Shared(512, 600),
        Shared(0, 511),
    ]


def test_groups_share_nothing() -> None:
    requests = [request(1024, 1, 2, group="a"), request(1024, 1, 2, group="b")]
    assert shared_prefixes(requests, 512) == [Shared(0, 0), Shared(0, 0)]


def test_blocks_of_64_give_all_four_sizes_exactly() -> None:
    """Two prompts of 640 tokens that share their first 448: 7 of 10 blocks."""
    advice = advise([request(640, *range(10)), request(640, *range(7), 20, 21, 22)], 64)
    reused = [448, 384, 256, 0]
    assert [each.reuse for each in advice.sizes] == [Range(tokens / 1280, tokens / 1280) for tokens in reused]
    assert [each.num_records for each in advice.sizes] == [Range(n, n) for n in (20 - 7, 10 - 3, 4 - 1, 2)]
    # 10 chunks of 64; 5 of 128; 2 of 256 and 127 tokens; 1 of 512 and 127 tokens.
    assert [each.transfers_per_request for each in advice.sizes] == [10, 5, 3, 2]
    assert [each.transfer_tokens for each in advice.sizes] == [64, 128, (512 + 127) / 3, (512 + 127) / 2]
    assert [each.chunk_bytes for each in advice.sizes] == [64_000, 128_000, 256_000, 512_000]
    assert [each.partial_share for each in advice.sizes] == [0, 0, 0.2, 0.2]
    assert [each.empty_share for each in advice.sizes] == pytest.approx([0, 0, 1 - 639 / 768, 1 - 639 / 1024])
    assert advice.recommended == 64
    assert "Take chunks of 64 tokens: they reuse 35.0%" in advice.sentence


def test_the_price_of_chunks_decides() -> None:
    """At 40 tokens a chunk, 20 chunks of 64 cost 800 tokens, and 10 of 128 cost 400: the best saves 384 - 400."""
    requests = [request(640, *range(10)), request(640, *range(7), 20, 21, 22)]
    costs = Costs(chunk_s=0.004, prefill_tokens_per_s=10_000)
    advice = advise(requests, 64, costs)
    assert [round(each.saved_share.low * 1280) for each in advice.sizes if each.saved_share] == [-352, -16, 16, -160]
    assert advice.recommended == 256


def test_coarse_blocks_give_bounds_and_say_so() -> None:
    advice = advise([request(1024, 1, 2), request(1024, 1, 3)], 512)
    assert [each.reuse for each in advice.sizes] == [
        Range(512 / 2048, 960 / 2048),
        Range(512 / 2048, 896 / 2048),
        Range(512 / 2048, 768 / 2048),
        Range(512 / 2048, 512 / 2048),
    ]
    assert [each.num_records for each in advice.sizes] == [Range(17, 24), Range(9, 12), Range(5, 6), Range(3, 3)]
    assert advice.recommended == 512
    assert "may save more, up to 46.9%: blocks of 512 tokens can't tell" in advice.sentence
    assert any("blocks of 512" in note for note in advice.notes)


def test_lengths_alone_give_no_reuse_and_no_recommendation() -> None:
    advice = advise([TracedRequest(at_ms=0, prompt_tokens=1000)], None)
    assert advice.recommended is None
    assert all(each.reuse is None and each.num_records is None and each.saved_share is None for each in advice.sizes)
    assert [each.transfers_per_request for each in advice.sizes] == [16, 8, 4, 2]
    assert "No size can be recommended" in advice.sentence


def test_a_trace_without_sharing_takes_the_fewest_chunks() -> None:
    advice = advise([request(640, *range(10)), request(640, *range(10, 20))], 64)
    assert advice.recommended == 512
    assert "no prompt of this trace shares" in advice.sentence


@given(prompt_tokens=st.integers(1, 3000), chunk_tokens=st.sampled_from([1, 64, 256]))
def test_hand_overs_are_counted_as_they_are_cut(prompt_tokens: int, chunk_tokens: int) -> None:
    plan = plan_chunks(
        bytes(32),
        [7] * prompt_tokens,
        chunk_tokens=chunk_tokens,
        payload_bytes=lambda tokens: tokens,
        transfer_id=TransferId("t"),
    )
    assert handed_over(prompt_tokens, chunk_tokens) == (len(plan), sum(chunk.num_tokens for chunk in plan))


prompts = st.lists(
    st.builds(
        lambda shared, own, token: [1] * shared + [token] * own,
        st.integers(0, 700),
        st.integers(1, 700),
        st.integers(2, 5),
    ),
    min_size=1,
    max_size=8,
)


@given(prompts)
def test_advice_agrees_with_comparing_the_tokens(prompts: list[list[int]]) -> None:
    """From hashes alone, at each size: just what comparing each prompt with all before it gives."""
    hasher = BlockHasher(b"k" * 32)
    requests = [request(len(tokens), *hasher.blocks(b"root", tokens)) for tokens in prompts]
    advice = advise(requests, BLOCK_TOKENS)
    total = sum(map(len, prompts))
    reuse = []
    for figures in advice.sizes:
        size, reused = figures.chunk_tokens, 0
        for index, tokens in enumerate(prompts):
            reused += max((common(tokens, earlier) // size * size for earlier in prompts[:index]), default=0)
        assert figures.reuse == Range(reused / total, reused / total)
        reuse.append(reused)
    assert reuse == sorted(reuse, reverse=True)


@given(prompts)
def test_bounds_of_coarser_blocks_hold_the_truth(prompts: list[list[int]]) -> None:
    """Of every eighth hash, as a trace with blocks of 512 has them: the exact figures lie between its bounds."""
    hasher = BlockHasher(b"k" * 32)
    fine = [request(len(tokens), *hasher.blocks(b"root", tokens)) for tokens in prompts]
    coarse = [request(each.prompt_tokens, *(each.blocks or ())[7::8]) for each in fine]
    exact, bounds = advise(fine, 64), advise(coarse, 512)
    for sure, bound in zip(exact.sizes, bounds.sizes, strict=True):
        assert sure.reuse is not None
        assert bound.reuse is not None
        assert bound.reuse.low <= sure.reuse.low <= bound.reuse.high
    assert exact.sizes[-1].reuse == bounds.sizes[-1].reuse
    assert tuple(each.chunk_tokens for each in exact.sizes) == CHUNK_SIZES


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
