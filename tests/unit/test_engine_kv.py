"""The paged KV: blocks, payloads, and attention over either kind of extent."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.engine.contract import EngineFull
from halfmoon.engine.torch.attention import PagedStep, Segment, causal_mask, paged_attention
from halfmoon.engine.torch.kv import BlockAllocator, Extent, LayerReader, PagedKV

LAYERS, HEADS, DIM, BLOCK = 3, 2, 8, 4
CPU = torch.device("cpu")


def paged(num_tokens: int = 64, dtype: torch.dtype = torch.float32) -> PagedKV:
    return PagedKV(
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        num_tokens=num_tokens,
        block_tokens=BLOCK,
        dtype=dtype,
        device=CPU,
    )


def consecutive(kv: PagedKV, num_tokens: int) -> Extent:
    extent = kv.take(num_tokens)
    assert extent.first is not None
    return extent


def scattered(kv: PagedKV, num_tokens: int) -> Extent:
    """Every second block is taken first, so that no run is left."""
    taken = [kv.take(BLOCK) for _ in range(kv.free_tokens // BLOCK)]
    for extent in taken[::2]:
        kv.give_back(extent)
    extent = kv.take(num_tokens)
    assert extent.first is None
    return extent


def random_payload(kv: PagedKV, num_tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> bytearray:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((LAYERS, 2, num_tokens, HEADS, DIM), generator=generator).to(dtype)
    payload = bytearray(values.view(torch.uint8).numpy().tobytes())
    assert len(payload) == num_tokens * kv.bytes_per_token
    return payload


@given(st.lists(st.one_of(st.integers(1, 9), st.integers(-12, -1)), max_size=40))
def test_blocks_against_a_naive_model(moves: list[int]) -> None:
    """Positive: take so many; negative: give that one back."""
    allocator, free = BlockAllocator(16), set(range(16))
    held: list[tuple[int, ...]] = []
    for move in moves:
        if move > 0:
            blocks = allocator.take(move)
            if move > len(free):
                assert blocks is None
                continue
            assert blocks is not None
            assert list(blocks) == sorted(set(blocks))
            assert len(blocks) == move
            assert free.issuperset(blocks)
            has_run = any(all(first + at in free for at in range(move)) for first in range(16))
            assert (blocks[-1] - blocks[0] == move - 1) == has_run
            free.difference_update(blocks)
            held.append(blocks)
        elif held:
            blocks = held.pop(move % len(held))
            allocator.give_back(blocks)
            free.update(blocks)
        assert allocator.num_free == len(free)


def test_a_block_is_freed_once() -> None:
    allocator = BlockAllocator(4)
    blocks = allocator.take(2)
    assert blocks is not None
    allocator.give_back(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.give_back(blocks)


def test_taking_is_all_or_nothing() -> None:
    kv = paged(64)
    kv.take(50)
    assert kv.free_tokens == 12
    with pytest.raises(EngineFull) as full:
        kv.take(13)
    assert (full.value.needed_tokens, full.value.free_tokens) == (13, 12)
    assert kv.free_tokens == 12
    with pytest.raises(ValueError, match="can't fit"):
        kv.take(65)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [consecutive, scattered])
@pytest.mark.parametrize(("start", "count"), [(0, 4), (0, 11), (4, 4), (3, 9), (10, 1)])
def test_what_is_loaded_is_exported(kind: object, start: int, count: int, dtype: torch.dtype) -> None:
    kv = paged(dtype=dtype)
    extent = consecutive(kv, 12) if kind is consecutive else scattered(kv, 12)
    kv.load(extent, 0, 12, memoryview(random_payload(kv, 12, seed=0, dtype=dtype)))
    payload = random_payload(kv, count, seed=1, dtype=dtype)
    kv.load(extent, start, count, memoryview(bytes(payload)))
    out = bytearray(len(payload))
    kv.export(extent, start, count, memoryview(out))
    assert out == payload
    whole = bytearray(12 * kv.bytes_per_token)
    kv.export(extent, 0, 12, memoryview(whole))
    expected = torch.frombuffer(random_payload(kv, 12, seed=0, dtype=dtype), dtype=dtype).view(
        LAYERS, 2, 12, HEADS, DIM
    )
    expected[:, :, start : start + count] = torch.frombuffer(payload, dtype=dtype).view(LAYERS, 2, count, HEADS, DIM)
    assert whole == expected.view(torch.uint8).numpy().tobytes(), "and nothing else has changed"


def test_the_layout_is_the_canonical_one() -> None:
    """`[layer][k, v][token][kv head][head dim]`, whatever the KV looks like inside."""
    kv = paged()
    extent = kv.take(8)
    keys, values = torch.randn((HEADS, 3, DIM)), torch.randn((HEADS, 3, DIM))
    kv.load(extent, 0, 8, memoryview(bytearray(8 * kv.bytes_per_token)))
    kv.write(1, extent.slots[2:5], keys, values)
    payload = bytearray(8 * kv.bytes_per_token)
    kv.export(extent, 0, 8, memoryview(payload))
    chunk = torch.frombuffer(payload, dtype=torch.float32).view(LAYERS, 2, 8, HEADS, DIM)
    assert torch.equal(chunk[1, 0, 2:5], keys.transpose(0, 1))
    assert torch.equal(chunk[1, 1, 2:5], values.transpose(0, 1))
    assert chunk[0].count_nonzero() == chunk[2].count_nonzero() == 0


@pytest.mark.parametrize("change", [-4, 4])
def test_payloads_have_one_size(change: int) -> None:
    kv = paged()
    extent = kv.take(8)
    with pytest.raises(ValueError, match="bytes"):
        kv.load(extent, 0, 4, memoryview(bytearray(4 * kv.bytes_per_token + change)))


def attend(
    kv: PagedKV,
    extents: Sequence[Extent],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    parts: Sequence[tuple[int, int]],
) -> torch.Tensor:
    """Attention of layer 1 for one packed step: `parts` holds each sequence's [start, stop)."""
    module = torch.nn.Module()
    module.layer_idx = 1  # type: ignore[assignment]
    groups = query.shape[1] // key.shape[1]
    singles: list[LayerReader] = []
    segments: list[Segment] = []
    begin = 0
    for extent, (start, stop) in zip(extents, parts, strict=True):
        context, count = kv.reader(extent, stop), stop - start
        if count == 1 and not segments:
            singles.append(context)
        else:
            segments.append(Segment(begin, count, context, causal_mask(count, stop, groups, query.dtype, CPU)))
        begin += count
    slots = torch.cat([extent.slots[start:stop] for extent, (start, stop) in zip(extents, parts, strict=True)])
    step = PagedStep(kv, slots, singles, segments)
    output, _ = paged_attention(module, query, key, value, None, DIM**-0.5, paged_step=step)
    return output[0]


def naive(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention, head by head and query by query: `[head][token][dim]` in, `[token][head][dim]` out."""
    groups = query.shape[0] // key.shape[0]
    output = torch.empty((query.shape[1], query.shape[0], DIM), dtype=query.dtype)
    for head in range(query.shape[0]):
        for token in range(query.shape[1]):
            scores = key[head // groups, : token + 1] @ query[head, token] * DIM**-0.5
            output[token, head] = scores.softmax(-1) @ value[head // groups, : token + 1]
    return output


@pytest.mark.parametrize("num_query_heads", [HEADS, 3 * HEADS])
def test_attention_is_the_same_over_either_kind_of_extent_and_however_it_is_cut(num_query_heads: int) -> None:
    lengths = (9, 12, 1)
    generator = torch.Generator().manual_seed(5)
    sequences = [
        tuple(torch.randn((heads, length, DIM), generator=generator) for heads in (num_query_heads, HEADS, HEADS))
        for length in lengths
    ]
    expected = [naive(*sequence) for sequence in sequences]
    for is_scattered in (False, True):
        for cuts in ((9, 12, 1), (4, 11, 0), (8, 1, 0)):  # first step up to there, then token by token
            kv = paged(128)
            first = scattered(kv, 12) if is_scattered else consecutive(kv, 12)
            extents = [first, kv.take(12), kv.take(4)]
            done = [torch.empty((0, num_query_heads, DIM)) for _ in lengths]
            at = [0, 0, 0]
            while any(position < length for position, length in zip(at, lengths, strict=True)):
                stops = [
                    max(cut, min(position + 1, length)) if position < cut or cut < length else length
                    for position, cut, length in zip(at, cuts, lengths, strict=True)
                ]
                active = [number for number in range(3) if at[number] < stops[number]]
                packed = [
                    torch.cat([sequences[number][part][:, at[number] : stops[number]] for number in active], dim=1)[
                        None
                    ]
                    for part in range(3)
                ]
                parts = [(at[number], stops[number]) for number in active]
                output = attend(kv, [extents[number] for number in active], packed[0], packed[1], packed[2], parts)
                for number, rows in zip(
                    active, torch.split(output, [stop - start for start, stop in parts]), strict=True
                ):
                    done[number] = torch.cat([done[number], rows])
                at = stops
            for ours, theirs in zip(done, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
