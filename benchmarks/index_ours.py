"""The conductor's index, filled from events as they come over the wire. `python -m benchmarks.index_ours HOLDERS`."""

import gc
import sys
import time
from collections.abc import Iterator

import msgspec

from benchmarks.index_load import NUM_WORKERS, asked, prompts, resident_bytes, serve_rounds
from halfmoon.scheduling.index import ChunkIndex
from halfmoon.schemas.chunks import ChunkEvent, ChunkMeta, ChunkRegistered
from halfmoon.schemas.ids import ChunkKey, NodeId, RequestId

_NODES = [NodeId(f"node-{number}") for number in range(NUM_WORKERS)]


def messages(num_holders: int) -> Iterator[bytes]:
    encode = msgspec.msgpack.encode
    for keys, holders in prompts(num_holders):
        chunks = tuple(
            ChunkMeta(
                key=ChunkKey(key),
                index=index,
                num_tokens=256,
                num_bytes=1 << 20,
                checksum=bytes(16),
                request_id=RequestId("r"),
                created_ns=1,
                parent=ChunkKey(keys[index - 1]) if index else None,
            )
            for index, key in enumerate(keys)
        )
        for holder in holders:
            yield encode(ChunkRegistered(node=_NODES[holder], epoch=1, chunks=chunks))


def main() -> None:
    num_holders = int(sys.argv[1])
    questions = asked(num_holders)
    decoder: msgspec.msgpack.Decoder[ChunkEvent] = msgspec.msgpack.Decoder(ChunkEvent)
    index = ChunkIndex()
    gc.collect()
    before_bytes, build_s = resident_bytes(), 0.0
    for message in messages(num_holders):
        started_s = time.process_time()
        index.apply(decoder.decode(message))
        build_s += time.process_time() - started_s
    gc.collect()
    print("BUILT", len(index), (resident_bytes() - before_bytes) / len(index), build_s, flush=True)
    live = dict.fromkeys(_NODES, 1)

    def copied(keys: list[bytes]) -> list[ChunkKey]:
        """The keys of a new prompt come from sha256: no dict has hashed them before."""
        return [ChunkKey(bytes(memoryview(key))) for key in keys]

    serve_rounds(lambda keys: len(index.match(keys, live)), copied, questions)


if __name__ == "__main__":
    main()
