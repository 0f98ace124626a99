"""How much of a prompt came before: the longest prefix that a request of a trace shares with an earlier one.

A trace knows prompts by hashes of blocks, each of which stands for its own tokens and all before them. So the shared
length is known to within a block:

    earlier   [ a ][ b ][ c ]
    this      [ a ][ b ][ d ]        shared: 2 blocks at least, and less than 3

Whatever the chunk size c, a pool that kept everything would save floor(shared / c) · c tokens: chunks are keyed by
prefix too. Where c is a multiple of the block, both bounds give the same.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from halfmoon.traces import TracedRequest


@dataclass(frozen=True, slots=True)
class Shared:
    """Bounds of the tokens that a prompt shares with one before it, both inclusive."""

    min_tokens: int
    max_tokens: int


def shared_prefixes(requests: Iterable[TracedRequest], block_tokens: int) -> list[Shared]:
    """For each request, in the order of the trace. Each must have its blocks; as if no KV were ever evicted."""
    seen: set[tuple[str, int]] = set()
    longest_child: dict[tuple[str, int | None], int] = {}
    """By block (None: the begin): the longest piece that a prompt so far had right behind it."""
    found = []
    for request in requests:
        blocks = request.blocks or ()
        num_shared = 0
        while num_shared < len(blocks) and (request.group, blocks[num_shared]) in seen:
            num_shared += 1
        min_tokens = min(num_shared * block_tokens, request.prompt_tokens)
        left = min(request.prompt_tokens - min_tokens, block_tokens)
        parent = (request.group, blocks[num_shared - 1] if num_shared else None)
        # Behind the shared blocks, the next differs in one token at least.
        more = max(0, min(left, longest_child.get(parent, 0), block_tokens - 1))
        found.append(Shared(min_tokens, min_tokens + more))
        _remember(request, blocks, block_tokens, seen, longest_child)
    return found


def _remember(
    request: TracedRequest,
    blocks: Sequence[int],
    block_tokens: int,
    seen: set[tuple[str, int]],
    longest_child: dict[tuple[str, int | None], int],
) -> None:
    parent: tuple[str, int | None] = (request.group, None)
    for begin in range(0, request.prompt_tokens, block_tokens):
        length = min(block_tokens, request.prompt_tokens - begin)
        longest_child[parent] = max(longest_child.get(parent, 0), length)
        index = begin // block_tokens
        if index >= len(blocks):
            return
        seen.add((request.group, blocks[index]))
        parent = (request.group, blocks[index])
