"""Which chunk size suits the traffic: what each would reuse, write, move and waste. Pure.

Small chunks reuse more of a prompt, and waste less in the last one. But each chunk has a price that doesn't depend on
its size: it is committed, announced, recorded, leased and pulled. What a size saves is the compute of the tokens that
it reuses, less its chunks' prices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from halfmoon.planner.traced import Shared, shared_prefixes
from halfmoon.traces import TracedRequest

CHUNK_SIZES = (64, 128, 256, 512)


class Range(msgspec.Struct, frozen=True):
    """What a figure is at least, and at most. Equal where the trace tells exactly."""

    low: float
    high: float

    @property
    def is_exact(self) -> bool:
        return self.low == self.high


class ChunkFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk size. Shares are of all prompt tokens, unless they say otherwise."""

    chunk_tokens: int
    chunk_bytes: int | None
    """None: the size of a token's KV isn't known."""
    reuse: Range | None
    """Share that was in whole chunks of an earlier prompt. None: the trace doesn't know prompts."""
    num_records: Range | None
    """Different whole chunks: each is one record of metadata."""
    transfers_per_request: float
    """Chunks that prefill hands to decode, the partial one included."""
    transfer_tokens: float
    """On average."""
    transfer_bytes: float | None
    partial_share: float
    """In the last, partial chunk of a prompt, which is handed over and never shared."""
    empty_share: float
    """Of the slots that hand-overs take: what partial chunks leave empty."""
    saved_share: Range | None
    """Reuse, less the chunks' prices in tokens of compute."""


class ChunkAdvice(msgspec.Struct, frozen=True, kw_only=True):
    num_requests: int
    prompt_tokens: int
    block_tokens: int | None
    """Of the trace's hashes. None: it has none."""
    kv_bytes_per_token: int | None
    chunk_cost_tokens: float
    """What a chunk costs beside its tokens, in tokens of compute."""
    sizes: tuple[ChunkFigures, ...]
    recommended: int | None
    sentence: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    chunk_s: float = 0.001
    """Of a chunk's life beside its compute and its bytes: commit, events, lease, pull."""
    prefill_tokens_per_s: float = 10_000.0

    @property
    def chunk_tokens(self) -> float:
        return self.chunk_s * self.prefill_tokens_per_s


def advise_chunks(
    requests: Sequence[TracedRequest],
    *,
    block_tokens: int | None,
    kv_bytes_per_token: int | None,
    costs: Costs,
    sizes: Sequence[int] = CHUNK_SIZES,
) -> ChunkAdvice:
    """Of at least one request, in the order of their arrival. `block_tokens`: None where they have no blocks."""
    if not requests:
        raise ValueError("advice needs at least one request")
    shared = shared_prefixes(requests, block_tokens) if block_tokens is not None else None
    figures = tuple(_figures(requests, shared, size, kv_bytes_per_token, costs) for size in sorted(set(sizes)))
    recommended, sentence = _recommend(figures, block_tokens, costs)
    return ChunkAdvice(
        num_requests=len(requests),
        prompt_tokens=sum(request.prompt_tokens for request in requests),
        block_tokens=block_tokens,
        kv_bytes_per_token=kv_bytes_per_token,
        chunk_cost_tokens=costs.chunk_tokens,
        sizes=figures,
        recommended=recommended,
        sentence=sentence,
        notes=_notes(figures, block_tokens, kv_bytes_per_token, costs),
    )


def handed_over(prompt_tokens: int, chunk_tokens: int) -> tuple[int, int]:
    """How many chunks of a prompt prefill provides, and how many tokens are in them: as `chunks.plan` cuts it."""
    num_whole, rest = divmod(prompt_tokens, chunk_tokens)
    partial = max(0, rest - 1)
    return num_whole + (partial > 0), num_whole * chunk_tokens + partial


def _figures(
    requests: Sequence[TracedRequest],
    shared: Sequence[Shared] | None,
    size: int,
    kv_bytes_per_token: int | None,
    costs: Costs,
) -> ChunkFigures:
    prompt_tokens = max(1, sum(request.prompt_tokens for request in requests))
    cut = [handed_over(request.prompt_tokens, size) for request in requests]
    num_transfers, num_moved = sum(count for count, _ in cut), sum(tokens for _, tokens in cut)
    num_whole = sum(request.prompt_tokens // size for request in requests)
    reuse = num_records = saved = None
    if shared is not None:
        low = sum(each.min_tokens // size for each in shared)
        high = sum(each.max_tokens // size for each in shared)
        reuse = Range(low * size / prompt_tokens, high * size / prompt_tokens)
        num_records = Range(num_whole - high, num_whole - low)
        price = num_transfers * costs.chunk_tokens / prompt_tokens
        saved = Range(reuse.low - price, reuse.high - price)
    transfer_tokens = num_moved / num_transfers if num_transfers else 0.0
    return ChunkFigures(
        chunk_tokens=size,
        chunk_bytes=None if kv_bytes_per_token is None else size * kv_bytes_per_token,
        reuse=reuse,
        num_records=num_records,
        transfers_per_request=num_transfers / len(requests),
        transfer_tokens=transfer_tokens,
        transfer_bytes=None if kv_bytes_per_token is None else transfer_tokens * kv_bytes_per_token,
        partial_share=sum(request.prompt_tokens % size for request in requests) / prompt_tokens,
        empty_share=1 - num_moved / (num_transfers * size) if num_transfers else 0.0,
        saved_share=saved,
    )


def _recommend(sizes: Sequence[ChunkFigures], block_tokens: int | None, costs: Costs) -> tuple[int | None, str]:
    """The size that surely saves the most; of equals, the largest."""
    judged = [(each.saved_share, each.reuse, each) for each in sizes if each.saved_share and each.reuse]
    if not judged:
        return None, (
            "No size can be recommended: this trace has lengths alone, and what prompts share decides. "
            "Record a running system with `halfmoon record`."
        )
    saved, reuse, best = max(judged, key=lambda each: (each[0].low, each[2].chunk_tokens))
    if reuse.high == 0:
        return best.chunk_tokens, (
            f"Take chunks of {best.chunk_tokens} tokens: no prompt of this trace shares a whole chunk with an earlier "
            "one, so the fewest chunks cost the least."
        )
    price = f"at {costs.chunk_s * 1000:g} ms a chunk and {costs.prefill_tokens_per_s:,.0f} tokens/s of prefill"
    rivals = [(share, each) for share, _, each in judged if each is not best and share.high > saved.low]
    if rivals:
        rival_share, rival = max(rivals, key=lambda each: each[0].high)
        return best.chunk_tokens, (
            f"Chunks of {best.chunk_tokens} tokens surely save {saved.low:.1%} of the prompts' compute, {price}. "
            f"Chunks of {rival.chunk_tokens} may save more, up to {rival_share.high:.1%}: blocks of {block_tokens} "
            "tokens can't tell; `halfmoon record` can."
        )
    others = ", ".join(f"{each.chunk_tokens}: {share.low:.1%}" for share, _, each in judged if each is not best)
    return best.chunk_tokens, (
        f"Take chunks of {best.chunk_tokens} tokens: they reuse {reuse.low:.1%} of the prompt tokens and save "
        f"{saved.low:.1%} of the prompts' compute, {price}" + (f" ({others})." if others else ".")
    )


def _notes(
    sizes: Sequence[ChunkFigures], block_tokens: int | None, kv_bytes_per_token: int | None, costs: Costs
) -> tuple[str, ...]:
    notes = []
    if block_tokens is None:
        notes.append("The trace has no hashes of prompts: reuse and records can't be known.")
    else:
        notes.append("Reuse is that of a pool which never evicts, and has a prompt's chunks before the next one comes.")
    if any(each.reuse is not None and not each.reuse.is_exact for each in sizes):
        notes.append(
            f"The trace hashes blocks of {block_tokens} tokens. For sizes that aren't a multiple, the lower figure is "
            "what whole blocks prove, the upper one adds all that the first differing block could still share."
        )
    if kv_bytes_per_token is None:
        notes.append("Bytes aren't known: name the model (--model), or give --kv-bytes-per-token.")
    notes.append(f"A chunk is taken to cost as much as computing {costs.chunk_tokens:g} tokens, beside its own.")
    return tuple(notes)
