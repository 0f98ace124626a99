"""How a prompt is cut: which positions prefill computes, in which chunks, and what stays for decode."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from halfmoon.chunks.keys import chunk_keys, handover_key
from halfmoon.schemas.ids import ChunkKey, TransferId


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    index: int
    key: ChunkKey
    parent: ChunkKey | None
    num_tokens: int
    num_bytes: int
    shared: bool
    """A whole chunk, keyed by content. False: the partial one, handed over under its transfer id."""


def plan_chunks(
    root: bytes,
    tokens: Sequence[int],
    *,
    chunk_tokens: int,
    payload_bytes: Callable[[int], int],
    transfer_id: TransferId,
) -> list[PlannedChunk]:
    """The chunks of a prompt that prefill provides and decode loads, in order. `payload_bytes`: of a card.

    For n tokens and chunks of c, with k = n // c:

        n % c == 0    k whole chunks; decode computes position n-1 over again, from a KV that it already has
        n % c == 1    k whole chunks; the one token left is decode's
        otherwise     k whole chunks, and one partial chunk of n % c - 1 tokens

    A prompt of one token has none (unless c is 1): there is nothing to prefill.
    """
    keys = chunk_keys(root, tokens, chunk_tokens)
    chunks = [
        PlannedChunk(
            index=index,
            key=key,
            parent=keys[index - 1] if index else None,
            num_tokens=chunk_tokens,
            num_bytes=payload_bytes(chunk_tokens),
            shared=True,
        )
        for index, key in enumerate(keys)
    ]
    left = len(tokens) % chunk_tokens - 1
    if left > 0:
        chunks.append(
            PlannedChunk(
                index=len(keys),
                key=handover_key(transfer_id, len(keys)),
                parent=keys[-1] if keys else None,
                num_tokens=left,
                num_bytes=payload_bytes(left),
                shared=False,
            )
        )
    return chunks
