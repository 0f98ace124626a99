"""Which chunks vLLM's prefix cache holds, from the KV events that it publishes.

An event names blocks by vLLM's hashes and gives their tokens; the first block of a prompt also gives the cache salt,
for which the root of the chunk keys is used. So each block leads back to a root and a position, and whole chunks to
their keys. A chunk counts as hot while its last block is cached: vLLM evicts a sequence from its end.

To forget is to use other salts from then on. vLLM's own reset does nothing while a sequence runs; a block whose salt is
no more used can't be found, and is evicted in its turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from halfmoon.chunks.keys import chunk_keys
from halfmoon.engine.contract import HotChanges
from halfmoon.schemas.ids import ChunkKey

BlockHash = int | bytes


@dataclass(slots=True)
class _Block:
    """A block in vLLM's cache, and the chunk that it is in."""

    before: bytes
    """Key of the last whole chunk before it, or the root."""
    tokens: tuple[int, ...]
    """Of its chunk, up to its own end."""
    key: ChunkKey | None = None
    """Of the chunk that ends with it."""


class HotChunks:
    """Follows the events of one engine. Pure."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._blocks: dict[BlockHash, _Block] = {}
        self._added: set[ChunkKey] = set()
        self._removed: set[ChunkKey] = set()
        self._is_reset = False
        self._generation = 0

    def salt(self, root: bytes) -> str:
        """The cache salt of sequences with this root, from now on."""
        return f"{root.hex()}.{self._generation}" if self._generation else root.hex()

    def root_of(self, salt: str) -> bytes | None:
        """None for a salt that isn't used any more."""
        root, _, generation = salt.partition(".")
        return bytes.fromhex(root) if int(generation or 0) == self._generation else None

    def forget(self) -> int:
        """Let nothing be found that is cached now; the chunks that it was known of."""
        num_chunks = sum(block.key is not None for block in self._blocks.values())
        self._generation += 1
        self.cleared()
        return num_chunks

    def stored(
        self, hashes: Sequence[BlockHash], parent: BlockHash | None, tokens: Sequence[int], root: bytes | None
    ) -> None:
        """These blocks are cached, each behind the one before, the first behind `parent`. `root`: of a first block;
        None where it can't be found any more."""
        before = self._blocks.get(parent) if parent is not None else None if root is None else _Block(root, ())
        if before is None:
            return  # What it stands behind was never told, or is forgotten: it can't be named.
        size = len(tokens) // len(hashes)
        for place, block_hash in enumerate(hashes):
            block = self._behind(before, tuple(tokens[place * size : (place + 1) * size]))
            self._blocks[block_hash] = before = block
            if block.key is not None:
                self._removed.discard(block.key)
                self._added.add(block.key)

    def removed(self, hashes: Sequence[BlockHash]) -> None:
        for block_hash in hashes:
            block = self._blocks.pop(block_hash, None)
            if block is not None and block.key is not None:
                self._added.discard(block.key)
                self._removed.add(block.key)

    def cleared(self) -> None:
        """Nothing is cached any more, or it isn't known what is."""
        self._blocks.clear()
        self._added.clear()
        self._removed.clear()
        self._is_reset = True

    def take_changes(self) -> HotChanges:
        changes = HotChanges(frozenset(self._added), frozenset(self._removed), self._is_reset)
        self._added.clear()
        self._removed.clear()
        self._is_reset = False
        return changes

    def _behind(self, before: _Block, tokens: tuple[int, ...]) -> _Block:
        start, so_far = (before.key, ()) if before.key is not None else (before.before, before.tokens)
        chunk = (*so_far, *tokens)
        block = _Block(start, chunk)
        if len(chunk) == self._chunk_tokens:
            [block.key] = chunk_keys(start, chunk, self._chunk_tokens)
        return block
