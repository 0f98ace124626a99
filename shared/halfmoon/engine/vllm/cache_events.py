"""Which chunks vLLM's prefix cache holds, from the KV events that it publishes.

An event names blocks by vLLM's hashes and gives their tokens; the first block of a prompt also gives the cache salt,
for which the root of the chunk keys is used. So each block leads back to a root and a position, and whole chunks to
their keys. A chunk counts as hot while its last block is cached: vLLM evicts a sequence from its end.

To forget a root is to use another salt for it from then on. vLLM's own reset does nothing while a sequence runs; a
block whose salt is no more used can't be found, and is evicted in its turn.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from halfmoon.chunks.keys import chunk_keys
from halfmoon.engine.contract import HotChanges
from halfmoon.schemas.ids import ChunkKey

BlockHash = int | bytes


@dataclass(slots=True)
class _Block:
    """A block in vLLM's cache, and the chunk that it is in."""

    root: bytes
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
        self._num_forgotten = 0
        """How often something was."""
        self._generation = 0
        """In the salts of roots, but for those in `_generations`: the `_num_forgotten` at which they were last."""
        self._generations: dict[bytes, int] = {}

    def salt(self, root: bytes) -> str:
        """The cache salt of sequences with this root, from now on."""
        generation = self._generation_of(root)
        return f"{root.hex()}.{generation}" if generation else root.hex()

    def root_of(self, salt: str) -> bytes | None:
        """None for a salt that isn't used any more."""
        name, _, generation = salt.partition(".")
        root = bytes.fromhex(name)
        return root if int(generation or 0) == self._generation_of(root) else None

    def forget(self, roots: Collection[bytes] | None = None) -> int:
        """Let nothing be found that is cached now of these roots, or (None) of any; the chunks known of it."""
        gone = [name for name, block in self._blocks.items() if roots is None or block.root in roots]
        num_chunks = sum(self._blocks[name].key is not None for name in gone)
        self._num_forgotten += 1
        if roots is None:
            self._generation = self._num_forgotten
            self._generations.clear()
            self.cleared()
        else:
            self._generations.update(dict.fromkeys(roots, self._num_forgotten))
            self.removed(gone)
        return num_chunks

    def stored(
        self, hashes: Sequence[BlockHash], parent: BlockHash | None, tokens: Sequence[int], root: bytes | None
    ) -> None:
        """These blocks are cached, each behind the one before, the first behind `parent`. `root`: of a first block;
        None where it can't be found any more."""
        before = self._blocks.get(parent) if parent is not None else None if root is None else _Block(root, root, ())
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

    def _generation_of(self, root: bytes) -> int:
        return self._generations.get(root, self._generation)

    def _behind(self, before: _Block, tokens: tuple[int, ...]) -> _Block:
        start, so_far = (before.key, ()) if before.key is not None else (before.before, before.tokens)
        chunk = (*so_far, *tokens)
        block = _Block(before.root, start, chunk)
        if len(chunk) == self._chunk_tokens:
            [block.key] = chunk_keys(start, chunk, self._chunk_tokens)
        return block
